// Code objects: their metadata, also where they are cut or wrong.
#include "ficco/hip_code.hpp"
#include "on_double.hpp"

namespace ficco::hip::test {
namespace {

using Sizes = std::vector<std::size_t>;

TEST(hip_metadata_tell_parameters) {
    const std::string code = code_object("gather");
    CHECK(parameter_sizes(code, "gather") == Sizes{8});
    CHECK_THROWS(GpuError, "no kernel scatter", parameter_sizes(code, "scatter"));
    CHECK_THROWS(GpuError, "no code object", parameter_sizes("", "gather"));
}

TEST(hip_code_objects_that_are_cut_are_refused) {
    const std::string code = code_object("gather");
    for (std::size_t bytes = 4; bytes < code.size(); ++bytes) {
        // A copy of its own size, so that a sanitizer finds a read beyond it.
        const std::vector<char> cut(code.begin(), code.begin() + static_cast<long>(bytes));
        CHECK_THROWS(GpuError, "cut short", parameter_sizes({cut.data(), cut.size()}, "gather"));
    }
}

TEST(hip_metadata_with_wrong_bytes_are_refused_or_read) {
    const std::string code = code_object("gather");
    const std::size_t begin = code.size() - metadata_of("gather").size();
    int refused = 0;
    for (std::size_t at = begin; at < code.size(); ++at) {
        for (int byte = 0; byte < 256; ++byte) {
            std::vector<char> wrong(code.begin(), code.end());
            wrong[at] = static_cast<char>(byte);
            try {
                CHECK_LE(parameter_sizes({wrong.data(), wrong.size()}, "gather").size(), 2U);
            } catch (const GpuError&) {
                ++refused;
            }
        }
    }
    CHECK_LE(1000, refused);
}

TEST(hip_metadata_are_needed) {
    std::string code = code_object("gather");
    const std::size_t at = code.find("AMDGPU");
    code[at] = 'X';
    CHECK_THROWS(GpuError, "no metadata of AMDGPU", parameter_sizes(code, "gather"));
}

}  // namespace
}  // namespace ficco::hip::test
