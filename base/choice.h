// Lists of types (layouts, precisions), each a std::variant: a loop over all types, and a way to pass one to a kernel.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <variant>

#include "formats.h"

// Calls visit(Type{}) for each type of a list, from index i on.
template <class List, size_t i = 0, class Visit>
void for_each_type(const Visit &visit) {
    visit(std::variant_alternative_t<i, List>{});
    if constexpr (i + 1 < std::variant_size_v<List>) for_each_type<List, i + 1>(visit);
}

template <class List>
const char *name_of(const List &choice) {
    return std::visit([](auto type) { return decltype(type)::name; }, choice);
}

// An object of one of a list's types, for CPU and GPU: the type's index in the list, and the object's bytes.
//   a Paged of 16 in std::variant<Contiguous, Paged, Ring>:   index 1, bytes {page 16, capacity, table ...}
// Why not the std::variant itself: std::visit and std::get are host functions, which kernels cannot call. Two
// choices are equal if their bytes are, as the types have no padding.
template <class List>
struct Choice;
template <class... Types>
struct Choice<std::variant<Types...>> {
    using List = std::variant<Types...>;
    int index = 0;
    alignas(Types...) char bytes[std::max({sizeof(Types)...})] = {};
    Choice() = default;
    Choice(const List &chosen) {
        static_assert(((std::is_empty_v<Types> || std::has_unique_object_representations_v<Types>)&&...));
        *this = std::visit([](auto &type) { return of(type); }, chosen);
    }
    // From an object whose type is known at compile time. Searches the list for that type, from index i on.
    template <class T, size_t i = 0>
    HOST_DEVICE static Choice of(const T &chosen) {
        if constexpr (std::is_same_v<T, std::variant_alternative_t<i, List>>) {
            Choice choice;
            choice.index = (int)i;
            if (!std::is_empty_v<T>) memcpy(choice.bytes, &chosen, sizeof chosen);
            return choice;
        } else {
            return of<T, i + 1>(chosen);
        }
    }
    bool operator==(const Choice &other) const {
        return index == other.index && memcmp(bytes, other.bytes, sizeof bytes) == 0;
    }
    // Calls use(object): compares the index with each type's in turn, from i on. All threads of a warp branch alike.
    CALLS_ITS_ARGUMENT
    template <int i = 0, class Use>
    HOST_DEVICE auto visit(Use use) const {
        if constexpr (i + 1 < (int)sizeof...(Types))
            if (index != i) return visit<i + 1>(use);
        return use(*(const std::variant_alternative_t<i, List> *)bytes);
    }
};
