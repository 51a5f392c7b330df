// A pretend GPU for a CPU build of torch: real tensors of device type CUDA, whose memory is host memory and whose
// kernels are the CPU's. environment.py says what it is for and what it cannot show; device.py has the Python side.
//
// Parts: memory and pinned memory; device guard and hooks, by which torch believes in the device; the rules of CUDA
// (what is an error, what makes the host wait); a boxed fallback of the CUDA dispatch key, which runs the CPU's kernel
// on aliases of the same memory; copies, which arrive as late as CUDA allows; a c10d backend "nccl" over gloo.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::IValue;

constexpr auto CUDA = DeviceType::CUDA;
std::atomic<int64_t> g_bytes{0}, g_peak{0};
thread_local int t_device = 0;
int g_devices = 1;
py::object* g_hook = nullptr;  // called with (kind, operator, bytes), never freed: threads outlive the interpreter
std::atomic<bool> g_counting{false};

void grow(int64_t n) {
  int64_t now = g_bytes += n;
  int64_t peak = g_peak;
  while (now > peak && !g_peak.compare_exchange_weak(peak, now)) {
  }
}

void flush_pending();

// A wait of the host for the device (or, with "async" in its kind, a copy without one): copies arrive, the hook counts.
void tell(const char* kind, const std::string& op, int64_t bytes = 0) {
  if (std::string(kind).find("async") == std::string::npos) flush_pending();
  if (!g_counting || g_hook == nullptr) return;
  py::gil_scoped_acquire gil;
  (*g_hook)(kind, op, bytes);
}

// ---------------------------------------------------------------- memory
struct Held {
  c10::Storage storage;  // the CPU storage that owns the memory
  int64_t bytes;
};

void release(void* context) {
  auto* held = static_cast<Held*>(context);
  g_bytes -= held->bytes;
  delete held;
}

// A CUDA DataPtr that keeps a CPU storage alive.
c10::DataPtr adopt(c10::Storage cpu, Device device) {
  void* data = cpu.mutable_data();
  auto* held = new Held{cpu, static_cast<int64_t>(cpu.nbytes())};
  grow(held->bytes);
  return c10::DataPtr(data, held, &release, device);
}

struct CudaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Storage cpu(c10::Storage::use_byte_size_t(), n, c10::GetAllocator(DeviceType::CPU), true);
    if (n) std::memset(cpu.mutable_data(), 0xFF, n);  // fresh device memory holds anything: here NaN, in every float type
    return adopt(cpu, Device(CUDA, t_device));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
CudaAllocator g_allocator;

std::mutex g_pinned_lock;
std::set<std::pair<uintptr_t, uintptr_t>> g_pinned;

void release_pinned(void* context) {
  auto* held = static_cast<Held*>(context);
  {
    std::lock_guard<std::mutex> lock(g_pinned_lock);
    auto start = reinterpret_cast<uintptr_t>(held->storage.data());
    g_pinned.erase({start, start + held->bytes});
  }
  delete held;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Storage cpu(c10::Storage::use_byte_size_t(), n, c10::GetAllocator(DeviceType::CPU), true);
    auto start = reinterpret_cast<uintptr_t>(cpu.mutable_data());
    std::lock_guard<std::mutex> lock(g_pinned_lock);
    g_pinned.insert({start, start + n});
    return {cpu.mutable_data(), new Held{cpu, static_cast<int64_t>(n)}, &release_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
PinnedAllocator g_pinned_allocator;

bool pinned(const void* data) {
  auto at = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> lock(g_pinned_lock);
  for (auto& [a, b] : g_pinned)
    if (a <= at && at < b) return true;
  return false;
}

// ---------------------------------------------------------------- device guard, hooks, generator
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device d) const override {
    Device old(CUDA, t_device);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(CUDA, t_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.type() == CUDA && d.index() < g_devices, "CUDA error: invalid device ordinal ", d);
    if (d.index() >= 0) t_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  c10::Stream getStream(Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, fix(d)); }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, fix(d)); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return c10::Stream(c10::Stream::DEFAULT, fix(d)); }
  c10::Stream getNewStream(Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, fix(d)); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return g_devices; }
  void record(void** e, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*e == nullptr) *e = new int(0);
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<int*>(e); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { flush_pending(); }
  void synchronizeEvent(void*) const override { flush_pending(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { flush_pending(); }
  static Device fix(Device d) { return Device(CUDA, d.index() < 0 ? t_device : d.index()); }
};

at::Generator& cuda_generator() {
  static at::Generator generator = at::detail::createCPUGenerator(1234);
  return generator;
}
}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return cuda_generator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  bool isPinnedPtr(const void* data) const override { return pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &g_allocator; }
  DeviceIndex deviceCount() const override { return g_devices; }
  DeviceIndex current_device() const override { return t_device; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(DeviceIndex d) const override { t_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = t_device; if (d >= 0) t_device = d; return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  int getNumGPUs() const override { return g_devices; }
  void deviceSynchronize(DeviceIndex) const override { flush_pending(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---------------------------------------------------------------- aliases: CUDA <-> CPU over one memory
struct HeldCuda {
  c10::Storage storage;
};
void release_alias(void* context) { delete static_cast<HeldCuda*>(context); }

c10::Storage cpu_storage_of(const c10::Storage& cuda) {
  auto* held = new HeldCuda{cuda};
  c10::DataPtr data(const_cast<void*>(cuda.data()), held, &release_alias, Device(DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), cuda.nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU), true);
}

Tensor like(const Tensor& t, c10::Storage storage, c10::DispatchKey key) {
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

struct Aliases {
  std::unordered_map<const c10::StorageImpl*, c10::Storage> to_cpu;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> to_cuda;  // CPU alias -> original
  std::unordered_map<const c10::TensorImpl*, Tensor> original;       // CPU alias -> CUDA tensor
  std::unordered_map<const c10::StorageImpl*, c10::DispatchKeySet> keys;  // of the tensor that has the storage
  std::vector<Tensor> kept;

  Tensor cpu(const Tensor& t) {
    if (!t.defined() || !t.is_cuda() || t.layout() != at::kStrided) return t;
    auto* key = t.storage().unsafeGetStorageImpl();
    auto found = to_cpu.find(key);
    if (found == to_cpu.end()) {
      found = to_cpu.emplace(key, cpu_storage_of(t.storage())).first;
      to_cuda.emplace(found->second.unsafeGetStorageImpl(), t.storage());
      keys.emplace(found->second.unsafeGetStorageImpl(), t.key_set());
    }
    Tensor alias = like(t, found->second, c10::DispatchKey::CPU);
    original.emplace(alias.unsafeGetTensorImpl(), t);
    kept.push_back(alias);
    return alias;
  }

  // After the kernel: an `out=` alias may have been resized.
  void write_back() {
    for (auto& alias : kept) {
      Tensor& t = original.at(alias.unsafeGetTensorImpl());
      auto storage = t.storage();
      if (alias.storage().data() != storage.data() || alias.storage().nbytes() > storage.nbytes()) {
        storage.set_data_ptr(adopt(alias.storage(), storage.device()));
        storage.set_nbytes(alias.storage().nbytes());
      }
      if (alias.sizes() != t.sizes() || alias.strides() != t.strides() || alias.storage_offset() != t.storage_offset())
        t.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  Tensor cuda(const Tensor& t, Device device) {
    if (!t.defined() || t.layout() != at::kStrided || !t.is_cpu()) return t;
    auto same = original.find(t.unsafeGetTensorImpl());
    if (same != original.end()) return same->second;
    auto view = to_cuda.find(t.storage().unsafeGetStorageImpl());
    if (view != to_cuda.end()) {  // of a tensor that inference mode may not own
      auto set = keys.at(t.storage().unsafeGetStorageImpl());
      Tensor out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(view->second), set, t.dtype());
      out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      if (t.is_conj() != out.is_conj()) out._set_conj(t.is_conj());
      if (t.is_neg() != out.is_neg()) out._set_neg(t.is_neg());
      return out;
    }
    auto nbytes = t.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, adopt(t.storage(), device), &g_allocator, true);
    return like(t, storage, c10::DispatchKey::CUDA);
  }
};

// ---------------------------------------------------------------- the rules of CUDA
const std::unordered_set<std::string> SYNCS = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::equal", "aten::unique_dim_consecutive", "aten::_assert_scalar"};
// these read index tensors on the host's device too
const std::unordered_set<std::string> MIXED = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_index_put_impl",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};
// no scalar tensors of the host
const std::unordered_set<std::string> STRICT = {
    "aten::index_select", "aten::gather", "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_",
    "aten::index_copy", "aten::index_copy_", "aten::index_add", "aten::index_add_", "aten::cat", "aten::mm", "aten::addmm",
    "aten::bmm", "aten::embedding", "aten::embedding_dense_backward", "aten::take", "aten::stack", "aten::dot"};

void check_devices(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  const std::string& name = schema.name();
  bool foreach = name.rfind("aten::_foreach", 0) == 0 || name.rfind("aten::_fused", 0) == 0;
  bool mixed = MIXED.count(name), strict = STRICT.count(name);
  const Tensor* cuda = nullptr;
  const Tensor* host = nullptr;
  auto look = [&](const Tensor& t, bool index) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      if (cuda == nullptr) cuda = &t;
      TORCH_CHECK(t.device() == cuda->device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  cuda->device(), " and ", t.device(), "! (", name, ")");
    } else if (t.is_cpu() && !index && (strict || t.dim() > 0)) {
      host = &t;
    }
  };
  bool self_on_host = false;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const IValue& v = stack[first + i];
    if (v.isTensor()) {
      if (mixed && i == 0) self_on_host = v.toTensor().is_cpu();
      if (mixed && i > 0 && v.toTensor().defined() && v.toTensor().is_cpu() && v.toTensor().numel() == 1) continue;
      look(v.toTensor(), false);
    } else if (v.isTensorList() || v.isOptionalTensorList() || v.isList()) {
      for (const IValue& e : v.toListRef())
        if (e.isTensor()) look(e.toTensor(), mixed);
    }
  }
  TORCH_CHECK(!self_on_host, "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
  if (cuda != nullptr && host != nullptr && !foreach)
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", cuda->device(),
                " and cpu! (", name, ", host tensor of sizes ", host->sizes(), ")");
}

// `x[mask] = scalar` is masked_fill, which does not wait.
bool is_masked_fill(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  if (schema.name().find("index_put") == std::string::npos || !stack[first + 2].isTensor()) return false;
  int masks = 0, others = 0;
  for (const IValue& e : stack[first + 1].toListRef())
    if (e.isTensor() && e.toTensor().defined()) {
      auto type = e.toTensor().scalar_type();
      (type == at::kBool || type == at::kByte ? masks : others)++;
    }
  return masks == 1 && others == 0 && stack[first + 2].toTensor().numel() == 1;
}

void check_index_sync(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  if (is_masked_fill(schema, stack, first)) return;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const IValue& v = stack[first + i];
    if (!v.isList()) continue;
    for (const IValue& e : v.toListRef())
      if (e.isTensor() && e.toTensor().defined()) {
        auto type = e.toTensor().scalar_type();
        if (type == at::kBool || type == at::kByte) tell("mask index", schema.name());
        else if (e.toTensor().is_cpu()) tell("H2D index", schema.name(), e.toTensor().nbytes());
      }
  }
}

// ---------------------------------------------------------------- the fallback of the CUDA key
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  check_devices(schema, *stack, first);
  const std::string& name = schema.name();
  if (SYNCS.count(name)) tell("sync op", name);
  if (MIXED.count(name)) check_index_sync(schema, *stack, first);
  if (name == "aten::repeat_interleave" && n == 2 && schema.arguments()[0].name() == "repeats" && (*stack)[first + 1].isNone())
    tell("sync op", "aten::repeat_interleave without output_size");

  Aliases aliases;
  bool any = false;
  Device device(CUDA, t_device);
  for (size_t i = 0; i < n; i++) {
    IValue& v = (*stack)[first + i];
    if (v.isTensor()) {
      const Tensor t = v.toTensor();
      if (t.defined() && t.is_cuda()) device = t.device(), any = true;
      v = aliases.cpu(t);
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) {
        if (t.defined() && t.is_cuda()) device = t.device(), any = true;
        list.push_back(aliases.cpu(t));
      }
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const IValue& e : v.toListRef()) {
        if (e.isNone()) {
          list.push_back(std::nullopt);
          continue;
        }
        const Tensor t = e.toTensor();
        if (t.defined() && t.is_cuda()) device = t.device(), any = true;
        list.push_back(aliases.cpu(t));
      }
      v = list;
    } else if (v.isDevice()) {
      if (v.toDevice().is_cuda()) {
        device = Device(CUDA, v.toDevice().index() < 0 ? t_device : v.toDevice().index());
        v = Device(DeviceType::CPU);
        any = true;
      }
    } else if (v.isNone() && schema.arguments()[i].name() == "generator") {
      v = cuda_generator();
    }
  }
  TORCH_INTERNAL_ASSERT(any, "pretend CUDA: no CUDA tensor in ", name);
  op.callBoxed(stack);
  aliases.write_back();
  const size_t returns = schema.returns().size(), out = stack->size() - returns;
  for (size_t i = 0; i < returns; i++) {
    IValue& v = (*stack)[out + i];
    if (v.isTensor()) {
      v = aliases.cuda(v.toTensor(), device);
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(aliases.cuda(t, device));
      v = list;
    }
  }
}

// ---------------------------------------------------------------- kernels
Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(Guard::fix(device.value_or(Device(CUDA))));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &g_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(Guard::fix(device.value_or(Device(CUDA))));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &g_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::Storage fresh(c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(DeviceType::CPU), true);
  if (bytes) std::memset(fresh.mutable_data(), 0xFF, bytes);
  size_t common = std::min<size_t>(bytes, storage.nbytes());
  if (common) std::memcpy(fresh.mutable_data(), storage.data(), common);
  storage.set_data_ptr(adopt(fresh, storage.device()));
  storage.set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->numel() && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device_type() == CUDA, "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\".");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  }
  return self;
}

Tensor& set_source_storage(Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.itemsize();
  c10::SymInt sizes[1] = {c10::SymInt(n)};
  return set_storage(self, source, c10::SymInt(0), c10::SymIntArrayRef(sizes, 1), {});
}

Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl != source.unsafeGetTensorImpl()) {
    impl->set_storage_keep_dtype(source.storage());
    impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  }
  return self;
}

Tensor& set_empty(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, g_allocator.allocate(0), &g_allocator, true);
  c10::SymInt sizes[1] = {c10::SymInt(0)};
  return set_storage(self, storage, c10::SymInt(0), c10::SymIntArrayRef(sizes, 1), {});
}

// Copies from the device that do not block arrive when something waits for the device; until then the host sees
// what was there.
// Copies to the device that do not block read the host's memory at any time until then: a write in between is an error.
struct Pending {
  Tensor host, snapshot;
};
std::mutex g_pending_lock;
std::vector<Pending> g_pending;  // device to host
std::vector<Pending> g_sent;     // host to device

bool same_bytes(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

void flush_pending() {
  std::vector<Pending> taken, sent;
  {
    std::lock_guard<std::mutex> lock(g_pending_lock);
    taken.swap(g_pending);
    sent.swap(g_sent);
  }
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  at::NoGradGuard no_grad;
  for (auto& each : sent)
    TORCH_CHECK(same_bytes(each.host, each.snapshot), "pinned memory was written before its copy to the device was done");
  for (auto& each : taken) each.host.copy_(each.snapshot);
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  Aliases aliases;
  bool from = src.is_cuda(), to = self.is_cuda();
  if (from && !to && self.is_cpu()) {
    if (non_blocking && self.numel() && pinned(self.storage().data())) {
      if (g_counting) tell("D2H async (pinned)", "copy_", src.nbytes());
      Tensor snapshot = aliases.cpu(src).to(self.scalar_type(), false, true);
      std::lock_guard<std::mutex> lock(g_pending_lock);
      g_pending.push_back({self, snapshot});
      return self;
    }  // to pageable memory the driver blocks anyway
    tell("D2H", "copy_", src.nbytes());
  } else if (!from && to && src.is_cpu()) {
    if (non_blocking && pinned(src.storage().data())) {
      if (g_counting) tell("H2D async (pinned)", "copy_", src.nbytes());
      if (src.is_contiguous()) {
        std::lock_guard<std::mutex> lock(g_pending_lock);
        g_sent.push_back({src.detach(), src.detach().clone()});
      }
    } else if (non_blocking) {
      if (g_counting) tell("H2D async (pageable)", "copy_", src.nbytes());
    } else {
      tell("H2D", "copy_", src.nbytes());
    }
  }
  Tensor a = aliases.cpu(self);
  a.copy_(aliases.cpu(src), non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor to = dst;
  copy_(to, self, non_blocking);
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  Tensor to = dst;
  to.resize_(self.sizes());
  copy_(to, self, false);
  return dst;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  tell("item", "_local_scalar_dense", self.itemsize());
  Aliases aliases;
  return at::_local_scalar_dense(aliases.cpu(self));
}

void record_stream(Tensor&, c10::Stream) {}

Tensor sdpa(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool causal,
            std::optional<double> scale, bool gqa) {
  for (const Tensor* t : {&k, &v})
    TORCH_CHECK(t->device() == q.device() && t->scalar_type() == q.scalar_type(),
                "Expected query, key, and value to have the same device type and dtype, but got ", q.device(), " ", t->device(), " ",
                q.scalar_type(), " ", t->scalar_type());
  TORCH_CHECK(!mask || !mask->defined() || mask->device() == q.device(), "attn_mask is on ", mask->device(), ", query on ", q.device());
  std::optional<Tensor> added = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, q.options()).masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, added, dropout, causal, std::nullopt, scale, gqa));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_source_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_source_tensor));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", TORCH_FN(sdpa)); }

// ---------------------------------------------------------------- NCCL over gloo
struct Works : c10d::Work {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::function<void()> after;
  std::vector<Tensor> results;
  bool done = false;
  Works(std::vector<c10::intrusive_ptr<c10d::Work>> w, std::function<void()> a, std::vector<Tensor> r)
      : works(std::move(w)), after(std::move(a)), results(std::move(r)) {}
  bool isCompleted() override {
    if (done) return true;
    for (auto& w : works) if (!w->isCompleted()) return false;
    return wait(std::chrono::milliseconds(0));
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    if (done) return true;
    for (auto& w : works) w->wait();
    if (after) after();
    done = true;
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  std::vector<Tensor> result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(std::chrono::milliseconds(0));
    auto f = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<Device>{Device(CUDA, t_device)});
    f->markCompleted(IValue(results));
    return f;
  }
};

struct Nccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  bool coalescing = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> queued;
  Nccl(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size) : c10d::Backend(rank, size), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}
  void startCoalescing() override { coalescing = true; }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    coalescing = false;
    auto all = c10::make_intrusive<Works>(std::move(queued), nullptr, std::vector<Tensor>{});
    queued.clear();
    return all;
  }
  static Tensor cpu(const Tensor& t, const char* what, bool contiguous = true) {
    TORCH_CHECK(t.is_cuda(), "NCCL: Tensors must be CUDA and dense (", what, "), got one on ", t.device());
    TORCH_CHECK(!contiguous || t.is_contiguous(), "NCCL: Tensors must be contiguous (", what, ")");
    return like(t, cpu_storage_of(t.storage()), c10::DispatchKey::CPU);
  }
  using W = c10::intrusive_ptr<c10d::Work>;
  W finish(std::vector<W> works, std::vector<Tensor> results, std::function<void()> after = nullptr) {
    W work = c10::make_intrusive<Works>(std::move(works), std::move(after), std::move(results));
    if (coalescing) queued.push_back(work);
    return work;
  }
  W broadcast(std::vector<Tensor>& ts, const c10d::BroadcastOptions& o) override {
    std::vector<Tensor> c{cpu(ts[0], "broadcast")};
    return finish({gloo->broadcast(c, o)}, ts);
  }
  W allreduce(std::vector<Tensor>& ts, const c10d::AllreduceOptions& o) override {
    Tensor t = cpu(ts[0], "all_reduce", false);
    c10d::AllreduceOptions p = o;
    bool mean = o.reduceOp == c10d::ReduceOp::AVG;
    if (mean) p.reduceOp = c10d::ReduceOp::SUM;
    bool flat = t.is_non_overlapping_and_dense();
    TORCH_CHECK(flat, "NCCL: Tensors must be contiguous (all_reduce)");
    Tensor work = t.is_contiguous() ? t : t.contiguous();
    std::vector<Tensor> c{work};
    int n = size_;
    return finish({gloo->allreduce(c, p)}, ts, [=]() mutable {
      at::NoGradGuard g;
      if (mean) work.div_(n);
      if (!work.is_same(t)) t.copy_(work);
    });
  }
  W allreduce_coalesced(std::vector<Tensor>& ts, const c10d::AllreduceCoalescedOptions& o) override {
    std::vector<W> works;
    for (auto& t : ts) {
      std::vector<Tensor> one{t};
      c10d::AllreduceOptions p;
      p.reduceOp = o.reduceOp;
      works.push_back(allreduce(one, p));
    }
    return finish(works, ts);
  }
  W reduce(std::vector<Tensor>& ts, const c10d::ReduceOptions& o) override {
    std::vector<Tensor> c{cpu(ts[0], "reduce")};
    return finish({gloo->reduce(c, o)}, ts);
  }
  W allgather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins, const c10d::AllgatherOptions&) override {
    std::vector<W> works;
    Tensor mine = cpu(ins[0], "all_gather");
    for (int r = 0; r < size_; r++) {  // parts may differ in length, as with NCCL
      Tensor part = cpu(outs[0][r], "all_gather");
      if (r == rank_) part.copy_(mine.view(part.sizes()));
      if (part.numel() == 0) continue;
      c10d::BroadcastOptions b;
      b.rootRank = r;
      std::vector<Tensor> c{part};
      gloo->broadcast(c, b)->wait();
    }
    return finish({}, outs[0]);
  }
  W _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(in.dtype() == out.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(in.numel() * size_ == out.numel(), "output tensor size must be equal to world_size times input tensor size");
    // in place: the input may be a part of the output
    Tensor a = cpu(out, "all_gather_into_tensor"), b = cpu(in, "all_gather_into_tensor").clone();
    return finish({gloo->_allgather_base(a, b, o)}, {out});
  }
  W allgather_into_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins, const c10d::AllgatherOptions& o) override {
    std::vector<W> works;
    for (size_t i = 0; i < outs.size(); i++) works.push_back(_allgather_base(outs[i], ins[i], o));
    return finish(works, outs);
  }
  W reduce_scatter(std::vector<Tensor>& outs, std::vector<std::vector<Tensor>>& ins, const c10d::ReduceScatterOptions& o) override {
    for (int r = 0; r < size_; r++) {
      std::vector<Tensor> c{cpu(ins[0][r], "reduce_scatter").clone()};
      if (c[0].numel() == 0) continue;
      c10d::AllreduceOptions p;
      p.reduceOp = o.reduceOp == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : o.reduceOp;
      gloo->allreduce(c, p)->wait();
      if (o.reduceOp == c10d::ReduceOp::AVG) c[0].div_(size_);
      if (r == rank_) cpu(outs[0], "reduce_scatter").copy_(c[0].view(outs[0].sizes()));
    }
    return finish({}, outs);
  }
  W _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(in.dtype() == out.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(out.numel() * size_ == in.numel(), "input tensor must be the same size as output size times world size");
    Tensor a = cpu(out, "reduce_scatter_tensor"), b = cpu(in, "reduce_scatter_tensor").clone();
    std::vector<Tensor> c{b};
    c10d::AllreduceOptions p;
    bool mean = o.reduceOp == c10d::ReduceOp::AVG;
    p.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : o.reduceOp;
    int n = size_, r = rank_;
    return finish({gloo->allreduce(c, p)}, {out}, [=]() mutable {
      at::NoGradGuard g;
      if (mean) b.div_(n);
      a.view(-1).copy_(b.view(-1).narrow(0, r * a.numel(), a.numel()));
    });
  }
  W reduce_scatter_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins, const c10d::ReduceScatterOptions& o) override {
    std::vector<W> works;
    for (size_t i = 0; i < outs.size(); i++) works.push_back(_reduce_scatter_base(outs[i], ins[i], o));
    return finish(works, outs);
  }
  W alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override {
    Tensor a = cpu(out, "all_to_all_single"), b = cpu(in, "all_to_all_single");
    return finish({gloo->alltoall_base(a, b, os, is, o)}, {out});
  }
  W alltoall(std::vector<Tensor>& outs, std::vector<Tensor>& ins, const c10d::AllToAllOptions& o) override {
    std::vector<Tensor> a, b;
    std::vector<int64_t> os, is;
    for (auto& t : outs) a.push_back(cpu(t, "all_to_all")), os.push_back(t.numel());
    for (auto& t : ins) b.push_back(cpu(t, "all_to_all").reshape(-1)), is.push_back(t.numel());
    Tensor in = at::cat(b), out = at::empty({std::accumulate(os.begin(), os.end(), int64_t(0))}, in.options());
    gloo->alltoall_base(out, in, os, is, o)->wait();
    auto parts = out.split_with_sizes(os);
    for (size_t i = 0; i < a.size(); i++) a[i].copy_(parts[i].view(a[i].sizes()));
    return finish({}, outs);
  }
  W gather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins, const c10d::GatherOptions& o) override {
    std::vector<std::vector<Tensor>> c(outs.size());
    for (size_t i = 0; i < outs.size(); i++)
      for (auto& t : outs[i]) c[i].push_back(cpu(t, "gather"));
    std::vector<Tensor> b{cpu(ins[0], "gather")};
    return finish({gloo->gather(c, b, o)}, {});
  }
  W scatter(std::vector<Tensor>& outs, std::vector<std::vector<Tensor>>& ins, const c10d::ScatterOptions& o) override {
    std::vector<std::vector<Tensor>> c(ins.size());
    for (size_t i = 0; i < ins.size(); i++)
      for (auto& t : ins[i]) c[i].push_back(cpu(t, "scatter"));
    std::vector<Tensor> b{cpu(outs[0], "scatter")};
    return finish({gloo->scatter(b, c, o)}, outs);
  }
  W send(std::vector<Tensor>& ts, int to, int) override {
    std::vector<Tensor> c{cpu(ts[0], "send")};
    return finish({gloo->send(c, to, 0)}, ts);
  }
  W recv(std::vector<Tensor>& ts, int from, int) override {
    std::vector<Tensor> c{cpu(ts[0], "recv")};
    return finish({gloo->recv(c, from, 0)}, ts);
  }
  W barrier(const c10d::BarrierOptions& o) override {
    tell("barrier", "barrier");
    return finish({gloo->barrier(o)}, {});
  }
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(CUDA, &g_allocator, 1);
  m.def("has_cuda", [] { return at::detail::getCUDAHooks().hasCUDA(); });
  m.def("set_hook", [](py::object hook) { g_hook = new py::object(std::move(hook)); });
  m.def("counting", [](bool on) { g_counting = on; });
  m.def("synchronize", [] { tell("synchronize", "torch.cuda.synchronize"); });
  m.def("bytes", [] { return g_bytes.load(); });
  m.def("peak", [] { return g_peak.load(); });
  m.def("reset_peak", [] { g_peak = g_bytes.load(); });
  m.def("set_devices", [](int n) { g_devices = n; });
  m.def("set_device", [](int n) {
    TORCH_CHECK_VALUE(n < g_devices, "CUDA error: invalid device ordinal");
    if (n >= 0) t_device = n;
  });
  m.def("device", [] { return t_device; });
  m.def("generator", [] { return cuda_generator(); });
  m.def("is_pinned", [](const Tensor& t) { return pinned(t.storage().data()); });
  m.def("resize_storage", [](const Tensor& of, int64_t bytes) { resize_storage(of.storage(), bytes); });
  m.def("cpu_alias", [](const Tensor& t) { return like(t, cpu_storage_of(t.storage()), c10::DispatchKey::CPU); });
  m.def("nccl", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Nccl>(std::move(gloo), rank, size);
  });
}
