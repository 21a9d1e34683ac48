"""Training runtimes: Centauri, Domino and DHelix, and the executor of a planned step."""
