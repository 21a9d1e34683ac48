// Admits one call at a time, also if an exception is raised between two bytecodes.
//
// A signal handler, a trace function or a profiler can raise after any bytecode. If that happens
// behind the acquisition of a lock and before the code that releases it, the lock stays locked for
// good, and no order of Python statements avoids that. Here one native call enters, calls and leaves.
//
// The GIL guards the flag. The type is written against CPython alone: a daemon thread that is inside
// as the interpreter ends is unwound by pthread_exit, and must meet no destructor of C++.
#include "bindings/bindings.h"

namespace flux::host {
namespace {

struct Exclusive {
  PyObject_HEAD;
  bool taken;
};

PyObject* call_and_leave(Exclusive& exclusive, PyObject* const* arguments, Py_ssize_t count) {
  exclusive.taken = true;
  PyObject* const result = PyObject_Vectorcall(arguments[0], arguments + 1,
                                               static_cast<std::size_t>(count - 1), nullptr);
  exclusive.taken = false;
  return result;
}

PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 2) {
    PyErr_SetString(PyExc_TypeError, "call() needs a refusal and a function");
    return nullptr;
  }
  auto& exclusive = *reinterpret_cast<Exclusive*>(self);
  if (exclusive.taken) {
    PyErr_SetObject(PyExc_RuntimeError, arguments[0]);
    return nullptr;
  }
  return call_and_leave(exclusive, arguments + 1, count - 1);
}

PyObject* try_call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 1) {
    PyErr_SetString(PyExc_TypeError, "try_call() needs a function");
    return nullptr;
  }
  auto& exclusive = *reinterpret_cast<Exclusive*>(self);
  if (exclusive.taken) Py_RETURN_FALSE;
  PyObject* const result = call_and_leave(exclusive, arguments, count);
  if (result == nullptr) return nullptr;
  Py_DECREF(result);
  Py_RETURN_TRUE;
}

PyObject* taken(PyObject* self, void*) {
  return PyBool_FromLong(reinterpret_cast<Exclusive*>(self)->taken);
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"call", as_method(&call), METH_FASTCALL,
     "call(refusal: str, function: Callable) -> object, with what else the function takes"},
    {"try_call", as_method(&try_call), METH_FASTCALL,
     "try_call(function: Callable) -> bool, with what else the function takes"},
    {},
};
PyGetSetDef properties[] = {{"taken", &taken, nullptr, nullptr, nullptr}, {}};
char doc[] = "Admits one call at a time. Calls enter or are turned away; they never wait.";
PyType_Slot slots[] = {
    {Py_tp_methods, methods}, {Py_tp_getset, properties}, {Py_tp_doc, doc}, {0, nullptr}};
PyType_Spec spec = {"flux._C.Exclusive", sizeof(Exclusive), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

void bind_exclusive(pybind11::module_& m) {
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw pybind11::error_already_set();
  m.attr("Exclusive") = pybind11::reinterpret_steal<pybind11::object>(type);
}

}  // namespace flux::host
