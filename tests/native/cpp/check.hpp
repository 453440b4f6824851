// A test is a function; CHECK ends the process at the first failed condition.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace ficco::test {

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Register {
    Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

[[noreturn]] inline void give_up(const char* file, int line, const std::string& what) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    std::fflush(stderr);
    std::_Exit(1);  // threads may still run
}

template <class A, class B>
void check_compared(bool so, const char* file, int line, const char* text, const A& a, const B& b) {
    if (so) return;
    std::ostringstream what;
    what << text << " is not so: " << a << " and " << b;
    give_up(file, line, what.str());
}

// Runs `call`, which must throw `Error`, and returns the message.
template <class Error, class Call>
std::string thrown(const char* file, int line, Call call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    } catch (const std::exception& error) {
        give_up(file, line, std::string("threw something else: ") + error.what());
    }
    give_up(file, line, "threw nothing");
}

}  // namespace ficco::test

#define TEST(name)                                                        \
    static void name();                                                   \
    static const ::ficco::test::Register register_##name(#name, &(name)); \
    static void name()

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            ::ficco::test::give_up(__FILE__, __LINE__, #condition " is not so"); \
        }                                                                        \
    } while (false)

#define CHECK_COMPARED(a, op, b)                                                                 \
    do {                                                                                         \
        const auto value_a = (a);                                                                \
        const auto value_b = (b);                                                                \
        ::ficco::test::check_compared(value_a op value_b, __FILE__, __LINE__, #a " " #op " " #b, \
                                      value_a, value_b);                                         \
    } while (false)

#define CHECK_EQ(a, b) CHECK_COMPARED(a, ==, b)
#define CHECK_LE(a, b) CHECK_COMPARED(a, <=, b)
#define CHECK_NEAR(a, b, tolerance) CHECK_COMPARED(std::abs((a) - (b)), <=, (tolerance))

#define CHECK_THROWS(Error, words, call)                                                          \
    do {                                                                                          \
        const std::string text = ::ficco::test::thrown<Error>(__FILE__, __LINE__, [&] { call; }); \
        if (text.find(words) == std::string::npos) {                                              \
            ::ficco::test::give_up(__FILE__, __LINE__, "does not say \"" words "\": " + text);    \
        }                                                                                         \
    } while (false)
