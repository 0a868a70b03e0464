// For a torch built without CUDA: a device guard and hooks that say that there is one CUDA device. They do nothing, but
// autograd's engine and torch's factories then take tensors that say they are on it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

static bool recording = false;

extern "C" void set_recording(bool now) { recording = now; }

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

const Device kDevice(DeviceType::CUDA, 0);

struct Guard : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, kDevice); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = &recording; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  bool isStreamCapturing(const Stream&) const { return recording; }  // virtual in later versions
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());

}  // namespace

namespace at {

struct PretendedHooks : public CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override { return detail::getDefaultCPUGenerator(); }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", PretendedHooks)

}  // namespace at
