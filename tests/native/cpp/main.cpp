// Runs all tests, or those whose names contain an argument; exit status 1 at the first failure.
#include <cstring>

#include "check.hpp"
#include "ficco/clock.hpp"

int main(int argc, char** argv) {
    int ran = 0;
    for (const ficco::test::Test& test : ficco::test::tests()) {
        bool asked = argc == 1;
        for (int at = 1; at < argc; ++at) asked |= std::strstr(test.name, argv[at]) != nullptr;
        if (!asked) continue;
        std::printf("%s ...", test.name);
        std::fflush(stdout);
        const std::int64_t start = ficco::now_ns();
        test.run();
        std::printf(" %.0f ms\n", static_cast<double>(ficco::now_ns() - start) * 1e-6);
        ++ran;
    }
    std::printf("%d tests passed\n", ran);
    return ran == 0 ? 1 : 0;
}
