// Makes a CPU build of torch believe in CUDA devices, which hold no memory and compute nothing.
//
// Operations on tensors of the device never run: they are computed on fake tensors. What remains in C++ is the device
// guard, which autograd uses around each node, and the hooks, through which torch asks whether the device exists.
// Methods that not every supported version declares as virtual have no `override`.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 8;

struct MockGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  static c10::Device device() noexcept { return {c10::DeviceType::CUDA, 0}; }
  static c10::Stream stream() noexcept { return c10::Stream(c10::Stream::DEFAULT, device()); }
};

struct MockHooks final : at::CUDAHooksInterface {
  explicit MockHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  int getNumGPUs() const { return kDevices; }
  c10::DeviceIndex deviceCount() const { return kDevices; }
  c10::DeviceIndex current_device() const { return 0; }
  c10::DeviceIndex getCurrentDevice() const { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const {}
};

c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> registered_hooks(
    "CUDAHooks", at::CUDAHooksRegistry(),
    [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<MockHooks>(args); });

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, MockGuard);
