// minivllm._core.Machine: conversion only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "machine.h"

namespace nb = nanobind;
using namespace minivllm;

void bind_machine(nb::module_& module) {
    nb::class_<Machine>(module, "Machine", "What this machine can do at most (csrc/machine.h).")
        .def(nb::init<int, int64_t>(), nb::arg("num_threads"), nb::arg("buffer_bytes"))
        .def("read_bandwidth", &Machine::read_bandwidth, nb::call_guard<nb::gil_scoped_release>(),
             "Bytes a second that the threads read together.")
        .def(
            "peaks",
            [](Machine& self) {
                std::vector<Peak> peaks;
                {
                    nb::gil_scoped_release release;
                    peaks = self.peaks();
                }
                std::vector<std::tuple<std::string, std::string, double>> rows;
                for (const Peak& peak : peaks) rows.emplace_back(peak.number, peak.instruction, peak.operations);
                return rows;
            },
            "(number, instruction, operations a second) for every instruction that the processor has.");
}
