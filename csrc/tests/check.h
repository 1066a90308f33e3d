// What the native tests need of a test framework: checks that print where they failed, and an exit status.
#pragma once

#include <cstdio>
#include <exception>
#include <string>

namespace check {

inline int& failures() {
    static int count = 0;
    return count;
}

inline void fail(const char* file, int line, const std::string& what) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    ++failures();
}

// The last line of main: return check::report();
inline int report() {
    std::fprintf(stderr, failures() == 0 ? "all checks passed\n" : "%d checks failed\n", failures());
    return failures() == 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(...)                                                         \
    do {                                                                   \
        if (!(__VA_ARGS__)) check::fail(__FILE__, __LINE__, #__VA_ARGS__); \
    } while (0)

// The statement must throw `Exception` (or one derived from it) with exactly this message.
#define CHECK_THROWS(Exception, message, ...)                                                                      \
    do {                                                                                                           \
        try {                                                                                                      \
            __VA_ARGS__;                                                                                           \
            check::fail(__FILE__, __LINE__, #__VA_ARGS__ " did not throw");                                        \
        } catch (const Exception& error) {                                                                         \
            if (std::string(error.what()) != (message))                                                            \
                check::fail(__FILE__, __LINE__, std::string(#__VA_ARGS__ " threw: ") + error.what());              \
        } catch (const std::exception& error) {                                                                    \
            check::fail(__FILE__, __LINE__, std::string(#__VA_ARGS__ " threw another type: ") + error.what());     \
        }                                                                                                          \
    } while (0)
