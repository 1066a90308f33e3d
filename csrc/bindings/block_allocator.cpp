// BlockAllocator for Python: conversion only. The Python face is minivllm/block_allocator/native.py.
//
// Arguments arrive as plain objects rather than through nanobind's casters, so that a wrong one is a BlockError in a
// sentence (the same one as the Python twin's) instead of a TypeError that lists C++ signatures.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <vector>

#include "block_allocator.h"

namespace nb = nanobind;
using minivllm::AllocatorStats;
using minivllm::BlockAllocator;
using minivllm::BlockError;

namespace {

// ascii(value), cut after 80 characters; `_shown` in reference.py is the same.
std::string shown(nb::handle value) {
    const nb::object text = nb::steal(PyObject_ASCII(value.ptr()));
    if (!text.is_valid()) {
        PyErr_Clear();
        return "an unprintable value";
    }
    const std::string ascii = nb::cast<std::string>(text);
    return ascii.size() <= 80 ? ascii : ascii.substr(0, 80) + "...";
}

std::string not_what(nb::handle value) {
    return ", not " + shown(value) + " (" + nb::cast<std::string>(nb::str(value.type().attr("__name__"))) + ")";
}

struct Integer {
    int64_t value;
    int overflow;      // -1 or 1 if the number is below or above what an int64 holds
    std::string text;  // the number itself, if so
};

// `value` as a number: an int or what converts to one without loss (numpy's integers), except bool.
Integer to_integer(nb::handle value, const char* what) {
    const bool is_int = PyLong_CheckExact(value.ptr());
    nb::object number = nb::borrow(value);
    if (!is_int) {
        number = PyBool_Check(value.ptr()) ? nb::object() : nb::steal(PyNumber_Index(value.ptr()));
        if (!number.is_valid()) {
            if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) {
                throw nb::python_error();
            }
            PyErr_Clear();
            throw BlockError(std::string(what) + " must be an integer" + not_what(value));
        }
    }
    Integer integer{0, 0, {}};
    integer.value = PyLong_AsLongLongAndOverflow(number.ptr(), &integer.overflow);
    if (integer.overflow != 0) {
        integer.text = shown(number);
    }
    return integer;
}

int32_t to_id(const BlockAllocator& allocator, nb::handle value) {
    const Integer integer = to_integer(value, "a block id");
    if (integer.overflow != 0) {
        throw allocator.unknown_block(integer.text);
    }
    return allocator.require_known(integer.value);
}

std::vector<int32_t> to_ids(const BlockAllocator& allocator, nb::handle block_ids) {
    nb::object items = nb::borrow(block_ids);
    if (!PyList_CheckExact(items.ptr()) && !PyTuple_CheckExact(items.ptr())) {
        const nb::object iterator = nb::steal(PyObject_GetIter(items.ptr()));
        if (!iterator.is_valid()) {
            if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
                throw nb::python_error();
            }
            PyErr_Clear();
            throw BlockError("block ids must be a list of integers" + not_what(block_ids));
        }
        items = nb::steal(PySequence_List(iterator.ptr()));
        if (!items.is_valid()) {
            throw nb::python_error();
        }
    }
    std::vector<int32_t> ids;
    ids.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
    // Size and items are read anew each time: an item's __index__ may be Python code that changes the list.
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
        int overflow = 1;
        const int64_t id = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : 0;
        ids.push_back(overflow == 0 ? allocator.require_known(id) : to_id(allocator, nb::borrow(item)));
    }
    return ids;
}

nb::object allocate(BlockAllocator& allocator, nb::handle count) {
    const Integer integer = to_integer(count, "the number of blocks");
    if (integer.overflow < 0) {
        throw BlockAllocator::bad_count(integer.text);
    }
    std::vector<int32_t> ids;
    if (integer.overflow > 0 || !allocator.allocate(integer.value, ids)) {
        return nb::none();
    }
    const auto size = static_cast<Py_ssize_t>(ids.size());
    nb::object list = nb::steal(PyList_New(size));
    for (Py_ssize_t i = 0; list.is_valid() && i < size; ++i) {
        PyObject* id = PyLong_FromLong(ids[static_cast<size_t>(i)]);
        if (id == nullptr) {
            list = nb::object();
        } else {
            PyList_SET_ITEM(list.ptr(), i, id);
        }
    }
    if (!list.is_valid()) {  // no memory for the answer: nobody would hold the blocks
        allocator.free(ids);
        throw nb::python_error();
    }
    return list;
}

void construct(BlockAllocator* self, nb::handle num_blocks) {
    const Integer integer = to_integer(num_blocks, "num_blocks");
    if (integer.overflow != 0) {
        throw BlockAllocator::bad_num_blocks(integer.text);
    }
    new (self) BlockAllocator(integer.value);
}

// In the order of AllocatorStats' fields in interface.py.
nb::tuple stats(const BlockAllocator& allocator) {
    const AllocatorStats s = allocator.stats();
    return nb::make_tuple(s.num_blocks, s.num_free, s.num_cached, s.num_in_use, s.num_shared, s.peak_in_use,
                          s.num_references, s.total_allocated);
}

template <typename T>
nb::bytes bytes_of(const std::vector<T>& values) {
    return nb::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

void translate(const std::exception_ptr& exception, void*) {
    try {
        std::rethrow_exception(exception);
    } catch (const BlockError& error) {
        PyErr_SetString(nb::module_::import_("minivllm.errors").attr("BlockError").ptr(), error.what());
    }
}

}  // namespace

void bind_block_allocator(nb::module_& module) {
    nb::register_exception_translator(translate);
    const auto any = nb::arg().none();  // positional only; None comes through, to be refused in our words
    nb::class_<BlockAllocator>(module, "BlockAllocator", "See minivllm.block_allocator.")
        .def("__init__", &construct, nb::arg("num_blocks").none())
        .def("allocate", &allocate, any)
        .def("free", [](BlockAllocator& self, nb::handle ids) { self.free(to_ids(self, ids)); }, any)
        .def("fork", [](BlockAllocator& self, nb::handle ids) { self.fork(to_ids(self, ids)); }, any)
        .def("ref_count", [](const BlockAllocator& self, nb::handle id) { return self.ref_count(to_id(self, id)); }, any)
        .def("is_shared", [](const BlockAllocator& self, nb::handle id) { return self.is_shared(to_id(self, id)); }, any)
        .def_prop_ro("num_blocks", &BlockAllocator::num_blocks)
        .def_prop_ro("num_free_blocks", &BlockAllocator::num_free_blocks)
        .def("check_integrity", &BlockAllocator::check_integrity)
        .def("_stats", &stats)
        .def("_ref_counts", [](const BlockAllocator& self) { return bytes_of(self.ref_counts()); })
        .def("_states", [](const BlockAllocator& self) { return bytes_of(self.states()); });
}
