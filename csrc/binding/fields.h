// The types of a plain struct's fields, in their order, which C++20 tells of no other way.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace penstock {
namespace fields {

struct Anything {
    template <class T>
    operator T() const;
};

// As many as initialisers are taken.
template <class Struct, class... Fields>
consteval std::size_t count() {
    if constexpr (requires { Struct{Fields{}..., Anything{}}; })
        return count<Struct, Fields..., Anything>();
    else
        return sizeof...(Fields);
}

template <class... Fields>
std::type_identity<std::tuple<Fields...>> types_of(Fields&...);

// Names bound to all fields, for their types alone: it is never called.
template <std::size_t Count, class Struct>
auto types(Struct& args) {
    static_assert(Count >= 4 && Count <= 18, "a struct of so many fields needs lines here");
    if constexpr (Count == 4) {
        auto& [a, b, c, d] = args;
        return types_of(a, b, c, d);
    }
    if constexpr (Count == 5) {
        auto& [a, b, c, d, e] = args;
        return types_of(a, b, c, d, e);
    }
    if constexpr (Count == 6) {
        auto& [a, b, c, d, e, f] = args;
        return types_of(a, b, c, d, e, f);
    }
    if constexpr (Count == 7) {
        auto& [a, b, c, d, e, f, g] = args;
        return types_of(a, b, c, d, e, f, g);
    }
    if constexpr (Count == 8) {
        auto& [a, b, c, d, e, f, g, h] = args;
        return types_of(a, b, c, d, e, f, g, h);
    }
    if constexpr (Count == 9) {
        auto& [a, b, c, d, e, f, g, h, i] = args;
        return types_of(a, b, c, d, e, f, g, h, i);
    }
    if constexpr (Count == 10) {
        auto& [a, b, c, d, e, f, g, h, i, j] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j);
    }
    if constexpr (Count == 11) {
        auto& [a, b, c, d, e, f, g, h, i, j, k] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j, k);
    }
    if constexpr (Count == 12) {
        auto& [a, b, c, d, e, f, g, h, i, j, k, l] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j, k, l);
    }
    if constexpr (Count == 13) {
        auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j, k, l, m);
    }
    if constexpr (Count == 14) {
        auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j, k, l, m, n);
    }
    if constexpr (Count == 15) {
        auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o);
    }
    if constexpr (Count == 16) {
        auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);
    }
    if constexpr (Count == 17) {
        auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q);
    }
    if constexpr (Count == 18) {
        auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r] = args;
        return types_of(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r);
    }
}

}  // namespace fields

// std::type_identity of a tuple of them.
template <class Struct>
using FieldsOf = decltype(fields::types<fields::count<Struct>()>(std::declval<Struct&>()));

}  // namespace penstock
