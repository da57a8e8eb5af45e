// The part of a CUDA runtime that torch's C++ asks for: how many devices there are, which of them and which stream is
// current in a thread, and which host memory is pinned. A CPU build of torch has none, and its autograd engine refuses
// tensors of a device without one. Everything else about a simulated device is Python; the order of streams is kept
// there, so events do nothing here.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace {

constexpr c10::DeviceIndex kMostDevices = 16;
c10::DeviceIndex device_count = 0;
thread_local c10::DeviceIndex this_device = 0;
thread_local c10::StreamId this_stream[kMostDevices] = {};

struct SimulatedGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, this_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) this_device = device.index();
  }
  c10::Stream stream_on(c10::Device device, c10::StreamId id) const {
    auto index = device.index() < 0 ? this_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_on(device, this_stream[device.index() < 0 ? this_device : device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_on(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    this_stream[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
};

// Host memory that says it is pinned.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned_blocks;

void free_pinned(void* block) {
  {
    std::lock_guard<std::mutex> locked(pinned_lock);
    pinned_blocks.erase(static_cast<const char*>(block));
  }
  std::free(block);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    std::lock_guard<std::mutex> locked(pinned_lock);
    pinned_blocks[static_cast<const char*>(block)] = bytes;
    return {block, block, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> locked(pinned_lock);
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned_blocks.begin()) return false;
  auto block = std::prev(after);
  return static_cast<const char*>(pointer) < block->first + block->second;
}

struct SimulatedHooks final : at::CUDAHooksInterface {
  explicit SimulatedHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return device_count > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return this_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { this_device = device; }
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard)
}
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}

extern "C" {
void set_device_count(int count) { device_count = static_cast<c10::DeviceIndex>(count); }
int get_device() { return this_device; }
void set_device(int device) { this_device = static_cast<c10::DeviceIndex>(device); }
long get_stream(int device) { return this_stream[device]; }
void set_stream(int device, long id) { this_stream[device] = id; }
}
