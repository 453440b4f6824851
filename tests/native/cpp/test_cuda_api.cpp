// Compares ficco's declarations of the driver with NVIDIA's own, if those are installed. The
// compiler checks all of it.
#include "check.hpp"
#include "ficco/cuda_api.hpp"

#ifdef FICCO_CUDA_HEADERS
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

namespace ficco::cuda {
namespace {

namespace own = ficco::cuda;

// Two types with equal calling convention: both pointers, or numbers of one size.
template <class One, class Other>
constexpr bool alike =
    sizeof(One) == sizeof(Other) && std::is_pointer_v<One> == std::is_pointer_v<Other> &&
    std::is_floating_point_v<One> == std::is_floating_point_v<Other>;

template <class One, class Other>
constexpr bool same_call = false;
template <class One, class... Ones, class Other, class... Others>
    requires(sizeof...(Ones) == sizeof...(Others))
constexpr bool same_call<One (*)(Ones...), Other (*)(Others...)> =
    alike<One, Other> && (alike<Ones, Others> && ...);

#define FICCO_PROVE(name, version, since, arguments)                                  \
    static_assert(same_call<own::Status(*) arguments, PFN_##name##_v##since>, #name); \
    static_assert(since <= version, #name);
FICCO_CUDA_FUNCTIONS(FICCO_PROVE)
FICCO_CUDA_LAUNCH_FUNCTIONS(FICCO_PROVE)
#undef FICCO_PROVE

static_assert(own::kSuccess == CUDA_SUCCESS);
static_assert(own::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(own::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(own::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(own::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(own::kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(own::kHostAllocMapped == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(own::kMemoryDevice == CU_MEMORYTYPE_DEVICE);
static_assert(own::kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(own::kCaptureActive == CU_STREAM_CAPTURE_STATUS_ACTIVE);
static_assert(own::kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(own::kNodeKernel == CU_GRAPH_NODE_TYPE_KERNEL);
static_assert(own::kNodeMemcpy == CU_GRAPH_NODE_TYPE_MEMCPY);
static_assert(own::kInterleaveNone == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(own::kPromoteTo128Bytes == CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
static_assert(sizeof(own::TensorMap) == sizeof(CUtensorMap));
static_assert(alignof(own::TensorMap) >= alignof(CUtensorMap));
static_assert(own::kOpWaitValue32 == CU_STREAM_MEM_OP_WAIT_VALUE_32);
static_assert(own::kOpWriteValue32 == CU_STREAM_MEM_OP_WRITE_VALUE_32);
static_assert(own::kWaitEqual == CU_STREAM_WAIT_VALUE_EQ);

constexpr int number(own::Attribute attribute) { return static_cast<int>(attribute); }
static_assert(number(own::Attribute::kPciBus) == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
static_assert(number(own::Attribute::kPciDevice) == CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
static_assert(number(own::Attribute::kPciDomain) == CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
static_assert(number(own::Attribute::kProcessors) == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(number(own::Attribute::kThreadsOfProcessor) ==
              CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
static_assert(number(own::Attribute::kAsyncEngineCount) == CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
static_assert(number(own::Attribute::kMajor) == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(number(own::Attribute::kMinor) == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(number(own::Attribute::kCanFlushRemoteWrites) ==
              CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES);

using Op = CUstreamBatchMemOpParams;
static_assert(sizeof(own::MemOp) == sizeof(Op));
#define FICCO_SAME_PLACE(own_field, wait_field, write_field)                                   \
    static_assert(offsetof(own::MemOp, word.own_field) == offsetof(Op, waitValue.wait_field)); \
    static_assert(offsetof(own::MemOp, word.own_field) == offsetof(Op, writeValue.write_field));
FICCO_SAME_PLACE(operation, operation, operation)
FICCO_SAME_PLACE(address, address, address)
FICCO_SAME_PLACE(value, value, value)
FICCO_SAME_PLACE(flags, flags, flags)
FICCO_SAME_PLACE(alias, alias, alias)
#undef FICCO_SAME_PLACE

static_assert(sizeof(own::Copy2D) == sizeof(CUDA_MEMCPY2D));
#define FICCO_SAME_PLACE(own_field, field) \
    static_assert(offsetof(own::Copy2D, own_field) == offsetof(CUDA_MEMCPY2D, field));
FICCO_SAME_PLACE(source_x_bytes, srcXInBytes)
FICCO_SAME_PLACE(source_y, srcY)
FICCO_SAME_PLACE(source_kind, srcMemoryType)
FICCO_SAME_PLACE(source_device, srcDevice)
FICCO_SAME_PLACE(source_pitch, srcPitch)
FICCO_SAME_PLACE(target_x_bytes, dstXInBytes)
FICCO_SAME_PLACE(target_y, dstY)
FICCO_SAME_PLACE(target_kind, dstMemoryType)
FICCO_SAME_PLACE(target_device, dstDevice)
FICCO_SAME_PLACE(target_pitch, dstPitch)
FICCO_SAME_PLACE(width_bytes, WidthInBytes)
FICCO_SAME_PLACE(height, Height)
#undef FICCO_SAME_PLACE

static_assert(own::kLaunchChained == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(sizeof(own::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(own::LaunchAttribute, id) == offsetof(CUlaunchAttribute, id));
static_assert(offsetof(own::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(CUlaunchAttributeValue::programmaticStreamSerializationAllowed) ==
              sizeof(own::LaunchAttribute::value.number));
static_assert(sizeof(own::LaunchConfig) == sizeof(CUlaunchConfig));
#define FICCO_SAME_PLACE(own_field, field) \
    static_assert(offsetof(own::LaunchConfig, own_field) == offsetof(CUlaunchConfig, field));
FICCO_SAME_PLACE(grid, gridDimX)
FICCO_SAME_PLACE(block, blockDimX)
FICCO_SAME_PLACE(shared_bytes, sharedMemBytes)
FICCO_SAME_PLACE(stream, hStream)
FICCO_SAME_PLACE(attributes, attrs)
FICCO_SAME_PLACE(count, numAttrs)
#undef FICCO_SAME_PLACE

}  // namespace
}  // namespace ficco::cuda
#endif
