// The parts of the Python module that have files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace penstock {

class Program;

void bind_packed(nanobind::module_& m);   // PackedMatrix
void bind_program(nanobind::module_& m);  // Program, StepInputs, KvLayout, KvBuffers
void bind_decode(nanobind::module_& m);   // DecodeRows
void bind_adapters(nanobind::module_& m, nanobind::class_<Program>& program);  // Part, AdapterTable, ops that take them

void bind_rank_group(nanobind::module_& m);                // RankGroup
void bind_shared_ops(nanobind::class_<Program>& program);  // ops over the ranks of a group

}  // namespace penstock
