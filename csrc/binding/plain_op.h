// Binds an op to programs by nothing but the fields of its arguments. Python hands them over in their order:
//
//   const T*   a value that is read, or none    T*         a value that is written, or none
//   Columns    some columns of a value          numbers    as they are; enumerations by number
//
// Nothing is handed over for a RowCount, which follows from the extent that comes last, and for StateRows, the step's.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding/fields.h"
#include "program/program.h"
#include "vec/dispatch.h"

namespace penstock {

using Value = Program::Value;

// Some columns of a value, as ops take them; Program::none for an absent input.
struct Part {
    Value value;
    std::int64_t offset, stride;  // in elements

    Columns at(const Frame& f) const {
        return value == Program::none ? Columns{} : Columns{f.at<const float>(value) + offset, stride};
    }
};

inline Extent extent_of(const std::string& name) {
    if (name == "tokens") return Extent::tokens;
    if (name == "logit_rows") return Extent::logit_rows;
    throw nanobind::value_error(("extent \"" + name + "\" is not one of tokens, logit_rows.").c_str());
}

// Which of a step's numbers an embedding looks up.
inline const std::int64_t* StepInputs::* lookup_of(const std::string& name) {
    if (name == "token_ids") return &StepInputs::token_ids;
    if (name == "positions") return &StepInputs::positions;
    if (name == "token_types") return &StepInputs::token_types;
    throw nanobind::value_error(("lookup \"" + name + "\" is not one of token_ids, positions, token_types.").c_str());
}

namespace plain {

// What Python hands over for a field, and what becomes of it in a run.
template <class Field>
struct Given {
    using Type = std::conditional_t<std::is_enum_v<Field>, int, Field>;
    static Field at(Type number, const Frame&) { return static_cast<Field>(number); }
};
template <class T>
struct Given<T*> {
    using Type = Value;
    static T* at(Value value, const Frame& f) { return f.at<T>(value); }
};
template <>
struct Given<Columns> {
    using Type = Part;
    static Columns at(const Part& part, const Frame& f) { return part.at(f); }
};

template <class Field>
constexpr bool is_given = !std::is_same_v<Field, RowCount> && !std::is_same_v<Field, StateRows>;

template <class Field>
using TakenFrom = std::conditional_t<is_given<Field>, std::tuple<typename Given<Field>::Type>, std::tuple<>>;

// Notes the value behind what was handed over for a field as one that the op reads or writes.
template <class Field, class Type>
void note(const Type& given, Program::Op& op) {
    if constexpr (std::is_same_v<Field, Columns>)
        op.reads.push_back(given.value);
    else if constexpr (std::is_pointer_v<Field>)
        (std::is_const_v<std::remove_pointer_t<Field>> ? op.reads : op.writes).push_back(given);
}

template <auto Run, class Args, class Fields, class Taken>
struct Recorder;

template <auto Run, class Args, class... Fields, class... Taken>
struct Recorder<Run, Args, std::tuple<Fields...>, std::tuple<Taken...>> {
    using All = std::tuple<Fields...>;

    // How many of the fields before each were handed over.
    static constexpr auto places = [] {
        std::array<std::size_t, sizeof...(Fields)> before{};
        const bool given[] = {is_given<Fields>...};
        for (std::size_t i = 1; i < before.size(); ++i) before[i] = before[i - 1] + (given[i - 1] ? 1 : 0);
        return before;
    }();

    template <std::size_t I>
    static std::tuple_element_t<I, All> field(const std::tuple<Taken...>& taken, const Frame& f, Extent extent) {
        using Field = std::tuple_element_t<I, All>;
        if constexpr (std::is_same_v<Field, RowCount>)
            return f.count(extent);
        else if constexpr (std::is_same_v<Field, StateRows>)
            return {f.step.query_start, f.step.context_len, f.step.state_slot, f.step.rows, f.step.state_after};
        else
            return Given<Field>::at(std::get<places[I]>(taken), f);
    }

    template <std::size_t... I>
    static void add(const char* name, Program& p, std::tuple<Taken...> taken, Extent extent,
                    std::index_sequence<I...>) {
        Program::Op op{name, {}, {}, {}, nullptr};
        const auto note_field = [&]<std::size_t At>() {
            using Field = std::tuple_element_t<At, All>;
            if constexpr (is_given<Field>) note<Field>(std::get<places[At]>(taken), op);
        };
        (note_field.template operator()<I>(), ...);
        op.run = [=](const Frame& f, Worker& w) { (ops().*Run)(Args{field<I>(taken, f, extent)...}, w); };
        p.add(std::move(op));
    }

    static void bind(nanobind::class_<Program>& program, const char* name) {
        program.def(name, [name](Program& p, Taken... taken, const std::string& extent) {
            add(name, p, {taken...}, extent_of(extent), std::index_sequence_for<Fields...>{});
        });
    }
};

}  // namespace plain

// Gives Program a method that records the op, of the same name.
template <auto Run, class Args>
void bind_plain_op(nanobind::class_<Program>& program, const char* name) {
    const auto bind = []<class... F>(std::type_identity<std::tuple<F...>>, auto& to, const char* as) {
        using Taken = decltype(std::tuple_cat(std::declval<plain::TakenFrom<F>>()...));
        plain::Recorder<Run, Args, std::tuple<F...>, Taken>::bind(to, as);
    };
    bind(FieldsOf<Args>{}, program, name);
}

}  // namespace penstock
