"""`flux doctor`: what this machine has, what ops will use, and why other parts are not used."""
