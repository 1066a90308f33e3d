// BlockAllocator for Python: conversion only. The Python face is minivllm/block_allocator/native.py.
//
// Arguments arrive as plain objects rather than through nanobind's casters, so that a wrong one is a BlockError in a
// sentence (the same one as the Python twin's) instead of a TypeError that lists C++ signatures.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
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

// `values` as a list or tuple; "`what` must be a list of integers" if it cannot be iterated.
nb::object to_sequence(nb::handle values, const char* what) {
    if (PyList_CheckExact(values.ptr()) || PyTuple_CheckExact(values.ptr())) {
        return nb::borrow(values);
    }
    const nb::object iterator = nb::steal(PyObject_GetIter(values.ptr()));
    if (!iterator.is_valid()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            throw nb::python_error();
        }
        PyErr_Clear();
        throw BlockError(std::string(what) + " must be a list of integers" + not_what(values));
    }
    nb::object items = nb::steal(PySequence_List(iterator.ptr()));
    if (!items.is_valid()) {
        throw nb::python_error();
    }
    return items;
}

// Each item of `values` through `convert(item, number or 0, 0 if that is the item's value)`.
template <typename Convert>
std::vector<int32_t> to_numbers(nb::handle values, const char* what, Convert convert) {
    const nb::object items = to_sequence(values, what);
    std::vector<int32_t> numbers;
    numbers.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
    // Size and items are read anew each time: an item's __index__ may be Python code that changes the list.
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
        int overflow = 1;
        const int64_t number = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : 0;
        numbers.push_back(convert(item, number, overflow));
    }
    return numbers;
}

std::vector<int32_t> to_ids(const BlockAllocator& allocator, nb::handle block_ids) {
    return to_numbers(block_ids, "block ids", [&](PyObject* item, int64_t id, int overflow) {
        return overflow == 0 ? allocator.require_known(id) : to_id(allocator, nb::borrow(item));
    });
}

int32_t to_token(PyObject* item, int64_t number, int overflow) {
    Integer integer{number, 0, {}};
    if (overflow != 0) {
        integer = to_integer(nb::borrow(item), "a token id");
    }
    if (integer.overflow != 0 || integer.value < INT32_MIN || integer.value > INT32_MAX) {
        throw BlockError("token id " + (integer.overflow != 0 ? integer.text : std::to_string(integer.value)) +
                         " does not fit an int32");
    }
    return static_cast<int32_t>(integer.value);
}

// The numbers of a contiguous one-dimensional int32 buffer (a numpy array, an array("i")) where they lie, or those of
// any other iterable in a vector.
class TokenIds {
public:
    explicit TokenIds(nb::handle values) {
        if (PyObject_CheckBuffer(values.ptr())) {
            if (PyObject_GetBuffer(values.ptr(), &buffer_, PyBUF_ND | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
                PyErr_Clear();  // not contiguous
                buffer_.obj = nullptr;
            } else if (buffer_.ndim == 1 && buffer_.itemsize == 4 && std::strcmp(buffer_.format, "i") == 0) {
                data_ = static_cast<const int32_t*>(buffer_.buf);
                size_ = buffer_.shape[0];
                return;
            } else {
                PyBuffer_Release(&buffer_);
            }
        }
        vector_ = to_numbers(values, "token ids", to_token);
        data_ = vector_.data();
        size_ = static_cast<int64_t>(vector_.size());
    }
    ~TokenIds() { PyBuffer_Release(&buffer_); }  // nothing happens if there is none
    TokenIds(const TokenIds&) = delete;

    const int32_t* data() const { return data_; }
    int64_t size() const { return size_; }

private:
    Py_buffer buffer_ = {};
    std::vector<int32_t> vector_;
    const int32_t* data_;
    int64_t size_;
};

std::string to_namespace(nb::handle space) {
    if (!PyBytes_Check(space.ptr())) {
        throw BlockError("a namespace must be bytes" + not_what(space));
    }
    return {PyBytes_AS_STRING(space.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(space.ptr()))};
}

// A list of the ids; not valid, with Python's error set, if there is no memory for it.
nb::object to_list(const std::vector<int32_t>& ids) {
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
    return list;
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
    nb::object list = to_list(ids);
    if (!list.is_valid()) {  // no memory for the answer: nobody would hold the blocks
        allocator.free(ids);
        throw nb::python_error();
    }
    return list;
}

// The fields of PrefixMatch in interface.py.
nb::tuple match_prefix(const BlockAllocator& allocator, nb::handle space, nb::handle token_ids) {
    const std::string name = to_namespace(space);
    const TokenIds tokens(token_ids);
    const minivllm::PrefixMatch match = allocator.match_prefix(name, tokens.data(), tokens.size());
    nb::object ids = to_list(match.block_ids);
    if (!ids.is_valid()) {
        throw nb::python_error();
    }
    const nb::object partial =
        match.partial_block == BlockAllocator::kNone ? nb::none() : nb::object(nb::int_(match.partial_block));
    return nb::make_tuple(ids, partial, match.partial_tokens);
}

nb::object publish(BlockAllocator& allocator, nb::handle space, nb::handle parent, nb::handle token_ids,
                   nb::handle block_ids) {
    const std::string name = to_namespace(space);
    const int32_t parent_id = parent.is_none() ? BlockAllocator::kNone : to_id(allocator, parent);
    const TokenIds tokens(token_ids);
    const std::vector<int32_t> ids = to_ids(allocator, block_ids);
    nb::object list = to_list(allocator.publish(name, parent_id, tokens.data(), tokens.size(), ids));
    if (!list.is_valid()) {
        throw nb::python_error();
    }
    return list;
}

void construct(BlockAllocator* self, nb::handle num_blocks, nb::handle block_size) {
    const Integer blocks = to_integer(num_blocks, "num_blocks");
    const Integer size = to_integer(block_size, "block_size");
    if (blocks.overflow != 0) {
        throw BlockAllocator::bad_num_blocks(blocks.text);
    }
    BlockAllocator::require_num_blocks(blocks.value);
    if (size.overflow != 0) {
        throw BlockAllocator::bad_block_size(size.text);
    }
    new (self) BlockAllocator(blocks.value, size.value);
}

// In the order of AllocatorStats' fields in interface.py.
nb::tuple stats(const BlockAllocator& allocator) {
    const AllocatorStats s = allocator.stats();
    return nb::make_tuple(s.num_blocks, s.num_free, s.num_cached, s.num_in_use, s.num_shared, s.num_published,
                          s.peak_in_use, s.num_references, s.total_allocated, s.total_evicted);
}

template <typename T>
nb::bytes bytes_of(const std::vector<T>& values) {
    return nb::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// The fields of PublishedBlocks in interface.py, the arrays as int32 bytes.
nb::tuple published(const BlockAllocator& allocator) {
    const minivllm::PublishedBlocks all = allocator.published();
    nb::list namespaces;
    for (const std::string& space : all.namespaces) {
        namespaces.append(nb::bytes(space.data(), space.size()));
    }
    const auto block_size = static_cast<size_t>(allocator.block_size());
    std::vector<int32_t> tokens;
    tokens.reserve(all.block_ids.size() * block_size);
    for (const int32_t id : all.block_ids) {
        tokens.insert(tokens.end(), allocator.token_ids(id), allocator.token_ids(id) + block_size);
    }
    return nb::make_tuple(namespaces, bytes_of(all.namespace_index), bytes_of(all.parents), bytes_of(tokens),
                          bytes_of(all.block_ids));
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
        .def("__init__", &construct, nb::arg("num_blocks").none(), nb::arg("block_size").none())
        .def("allocate", &allocate, any)
        .def("free", [](BlockAllocator& self, nb::handle ids) { self.free(to_ids(self, ids)); }, any)
        .def("fork", [](BlockAllocator& self, nb::handle ids) { self.fork(to_ids(self, ids)); }, any)
        .def("publish", &publish, any, any, any, any)
        .def("reset_prefix_cache", &BlockAllocator::reset_prefix_cache)
        .def("ref_count", [](const BlockAllocator& self, nb::handle id) { return self.ref_count(to_id(self, id)); }, any)
        .def("is_shared", [](const BlockAllocator& self, nb::handle id) { return self.is_shared(to_id(self, id)); }, any)
        .def_prop_ro("num_blocks", &BlockAllocator::num_blocks)
        .def_prop_ro("block_size", &BlockAllocator::block_size)
        .def_prop_ro("num_free_blocks", &BlockAllocator::num_free_blocks)
        .def("check_integrity", &BlockAllocator::check_integrity)
        .def("_match_prefix", &match_prefix, any, any)
        .def("_published", &published)
        .def("_stats", &stats)
        .def("_ref_counts", [](const BlockAllocator& self) { return bytes_of(self.ref_counts()); })
        .def("_states", [](const BlockAllocator& self) { return bytes_of(self.states()); });
}
