// Compares ficco's declarations of HIP with AMD's own of HIP 7, if those are installed (the triton
// wheel has them from Triton 3.6 on). The compiler checks all of it.
#include "check.hpp"
#include "ficco/hip_api.hpp"

#if defined(FICCO_HIP_HEADERS) && __has_include(<hip/hip_version.h>)
#include <hip/hip_version.h>
#if HIP_VERSION_MAJOR == 7
#define FICCO_COMPARES
#endif
#endif

#ifdef FICCO_COMPARES
#include <hip/hip_runtime_api.h>

#include <cstddef>
#include <string_view>
#include <type_traits>

namespace ficco::hip {
namespace {

namespace own = ficco::hip;

// Two types with equal calling convention: both pointers, both classes, or numbers of one size.
template <class One, class Other>
constexpr bool alike = sizeof(One) == sizeof(Other) && alignof(One) == alignof(Other) &&
                       std::is_pointer_v<One> == std::is_pointer_v<Other> &&
                       std::is_class_v<One> == std::is_class_v<Other> &&
                       std::is_floating_point_v<One> == std::is_floating_point_v<Other>;

template <class One, class Other>
constexpr bool same_call = false;
template <class One, class... Ones, class Other, class... Others>
    requires(sizeof...(Ones) == sizeof...(Others))
constexpr bool same_call<One (*)(Ones...), Other(Others...)> =
    alike<One, Other> && (alike<Ones, Others> && ...);

constexpr std::size_t kFirst = __COUNTER__;
#define FICCO_PROVE(name)                                                          \
    static_assert(__COUNTER__ > kFirst);                                           \
    static_assert(same_call<decltype(own::Table::name), decltype(::name)>, #name); \
    static_assert(std::string_view(own::name_of<&own::Table::name>()) == #name);
// Of a name that the headers overload by a template.
#define FICCO_PROVE_OVERLOAD(name, ...)                                                       \
    static_assert(__COUNTER__ > kFirst);                                                      \
    static_assert(std::is_same_v<decltype(static_cast<hipError_t (*)(__VA_ARGS__)>(&::name)), \
                                 hipError_t (*)(__VA_ARGS__)>);                               \
    static_assert(same_call<decltype(own::Table::name), hipError_t(__VA_ARGS__)>, #name);     \
    static_assert(std::string_view(own::name_of<&own::Table::name>()) == #name);
FICCO_PROVE(hipGetErrorName)
FICCO_PROVE(hipGetErrorString)
FICCO_PROVE(hipGetLastError)
FICCO_PROVE(hipDriverGetVersion)
FICCO_PROVE(hipGetDeviceCount)
FICCO_PROVE(hipGetDevice)
FICCO_PROVE(hipSetDevice)
FICCO_PROVE(hipGetDevicePropertiesR0600)
FICCO_PROVE(hipDeviceGetAttribute)
FICCO_PROVE(hipDeviceCanAccessPeer)
FICCO_PROVE(hipDeviceEnablePeerAccess)
FICCO_PROVE(hipDeviceSynchronize)
FICCO_PROVE(hipDeviceGetStreamPriorityRange)
FICCO_PROVE(hipExtMallocWithFlags)
FICCO_PROVE(hipFree)
FICCO_PROVE_OVERLOAD(hipHostMalloc, void**, std::size_t, unsigned)
FICCO_PROVE(hipHostGetDevicePointer)
FICCO_PROVE(hipHostFree)
FICCO_PROVE(hipIpcGetMemHandle)
FICCO_PROVE(hipIpcOpenMemHandle)
FICCO_PROVE(hipIpcCloseMemHandle)
FICCO_PROVE(hipMemsetAsync)
FICCO_PROVE(hipMemcpyAsync)
FICCO_PROVE(hipStreamCreateWithPriority)
FICCO_PROVE(hipStreamDestroy)
FICCO_PROVE(hipStreamQuery)
FICCO_PROVE(hipStreamWaitEvent)
FICCO_PROVE(hipEventCreateWithFlags)
FICCO_PROVE(hipEventDestroy)
FICCO_PROVE(hipEventRecord)
FICCO_PROVE(hipEventSynchronize)
FICCO_PROVE(hipEventElapsedTime)
FICCO_PROVE(hipThreadExchangeStreamCaptureMode)
FICCO_PROVE(hipStreamBeginCapture)
FICCO_PROVE(hipStreamEndCapture)
FICCO_PROVE(hipStreamIsCapturing)
FICCO_PROVE(hipStreamGetCaptureInfo_v2)
FICCO_PROVE(hipGraphGetNodes)
FICCO_PROVE(hipGraphNodeGetType)
FICCO_PROVE(hipGraphInstantiateWithFlags)
FICCO_PROVE(hipGraphLaunch)
FICCO_PROVE(hipGraphExecDestroy)
FICCO_PROVE(hipGraphDestroy)
FICCO_PROVE(hipModuleLoadData)
FICCO_PROVE(hipModuleGetFunction)
FICCO_PROVE(hipModuleLaunchKernel)
static_assert((__COUNTER__ - kFirst - 1) * sizeof(void (*)()) == sizeof(own::Table));
#undef FICCO_PROVE
#undef FICCO_PROVE_OVERLOAD

static_assert(own::kSuccess == hipSuccess);
static_assert(own::kNoDevice == hipErrorNoDevice);
static_assert(own::kNotReady == hipErrorNotReady);
static_assert(own::kReachedAlready == hipErrorPeerAccessAlreadyEnabled);
static_assert(own::kStreamNonBlocking == hipStreamNonBlocking);
static_assert(own::kEventDisableTiming == hipEventDisableTiming);
static_assert(own::kHostPortable == hipHostMallocPortable);
static_assert(own::kHostMapped == hipHostMallocMapped);
static_assert(own::kHostCoherent == hipHostMallocCoherent);
static_assert(own::kMemoryFineGrained == hipDeviceMallocFinegrained);
static_assert(own::kMemoryUncached == hipDeviceMallocUncached);
static_assert(own::kThreadsOfUnit == hipDeviceAttributeMaxThreadsPerMultiProcessor);
static_assert(own::kWallClockRate == hipDeviceAttributeWallClockRate);
static_assert(own::kNumberOfXccs == hipDeviceAttributeNumberOfXccs);
static_assert(own::kIpcEnablePeerAccess == hipIpcMemLazyEnablePeerAccess);
static_assert(own::kCopyToDevice == hipMemcpyHostToDevice);
static_assert(own::kCopyToHost == hipMemcpyDeviceToHost);
static_assert(own::kCopyWithoutComputeUnits == hipMemcpyDeviceToDeviceNoCU);
static_assert(own::kCaptureNone == hipStreamCaptureStatusNone);
static_assert(own::kCaptureActive == hipStreamCaptureStatusActive);
static_assert(own::kCaptureModeRelaxed == hipStreamCaptureModeRelaxed);
static_assert(own::kNodeKernel == hipGraphNodeTypeKernel);
static_assert(own::kNodeMemcpy == hipGraphNodeTypeMemcpy);

static_assert(sizeof(own::IpcHandle) == sizeof(hipIpcMemHandle_t));
using Theirs = hipDeviceProp_tR0600;
static_assert(sizeof(own::Properties) == sizeof(Theirs));
#define FICCO_SAME_PLACE(own_field, field)                                          \
    static_assert(offsetof(own::Properties, own_field) == offsetof(Theirs, field)); \
    static_assert(sizeof(own::Properties::own_field) == sizeof(Theirs::field));
FICCO_SAME_PLACE(name, name)
FICCO_SAME_PLACE(memory_bytes, totalGlobalMem)
FICCO_SAME_PLACE(shared_bytes, sharedMemPerBlock)
FICCO_SAME_PLACE(registers, regsPerBlock)
FICCO_SAME_PLACE(warp, warpSize)
FICCO_SAME_PLACE(major, major)
FICCO_SAME_PLACE(minor, minor)
FICCO_SAME_PLACE(compute_units, multiProcessorCount)
FICCO_SAME_PLACE(pci_bus, pciBusID)
FICCO_SAME_PLACE(pci_device, pciDeviceID)
FICCO_SAME_PLACE(pci_domain, pciDomainID)
FICCO_SAME_PLACE(tcc, tccDriver)
FICCO_SAME_PLACE(copy_engines, asyncEngineCount)
FICCO_SAME_PLACE(arch, gcnArchName)
#undef FICCO_SAME_PLACE

}  // namespace
}  // namespace ficco::hip
#endif

TEST(hip_declarations_are_those_of_its_headers) {
#ifndef FICCO_COMPARES
    std::puts("skipped: no headers of HIP 7; install triton 3.6");
#endif
}
