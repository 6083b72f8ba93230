// A device of type "cuda" for CPU-only builds of torch. Its tensors report is_cuda, dispatch by CUDA's keys, and are differentiated
// in autograd's device threads; their memory is the host's, and torch's CPU kernels compute on aliases of it, so values are real.
//
// What the host would not notice is an error here: tensors of two devices in one kernel, kernels of two streams that touch the same
// memory without waiting for each other, results of communication that nobody has waited for, host memory that is read before a copy
// to it has ended. Counted are kernels, bytes, copies between host and device and host synchronizations. CUDA's and NCCL's speed and
// numerics are not emulated. See device/__init__.py for how it is used.
#include <algorithm>
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace torch::jit {
pybind11::object toPyObject(c10::IValue ivalue);  // torch/csrc/jit/python/pybind_utils.h takes long to compile
}

namespace emulated {
using namespace at;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr int DEVICES = 8;

// How many of them this process sees: all, or as many as CUDA_VISIBLE_DEVICES lists.
static int visible() {
  static const int found = [] {
    const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
    return list ? static_cast<int>(std::count(list, list + std::strlen(list), ',')) + 1 : DEVICES;
  }();
  return found;
}
static thread_local DeviceIndex current_device = 0;
static thread_local std::array<c10::StreamId, DEVICES> current_streams{};

static DeviceIndex index_of(Device d) { return d.index() < 0 ? current_device : d.index(); }

struct OnDevice {
  DeviceIndex before;
  explicit OnDevice(std::optional<Device> d) : before(current_device) {
    if (d && d->has_index()) current_device = d->index();
  }
  ~OnDevice() { current_device = before; }
};

// ---- what is counted -------------------------------------------------------------------------------------------------
static std::mutex counts_mutex;
static std::map<std::pair<std::string, std::string>, int64_t> counts;  // by kind and name
static std::atomic<bool> counting{false};
static std::atomic<int64_t> moved_bytes{0};
static std::unordered_set<std::string> watched;  // kinds of which the callback is told
static PyObject* watcher = nullptr;

static void count(const std::string& kind, const std::string& name) {
  if (!counting) return;
  bool tell = false;
  {
    std::lock_guard<std::mutex> guard(counts_mutex);
    counts[{kind, name}]++;
    tell = watcher && watched.count(kind);
  }
  if (tell) {
    pybind11::gil_scoped_acquire gil;
    pybind11::handle callback{watcher};
    callback(kind, name);
  }
}

// ---- streams ---------------------------------------------------------------------------------------------------------
// Kernels run when they are launched. That they would be right with real streams is told by vector clocks: each
// launch is a tick of its stream, and a stream knows up to which tick of every other stream it has waited. Memory keeps who
// touched it last. A kernel that reads what another stream wrote, or writes what another stream touched, has to know that tick.
using StreamKey = int64_t;
using Clock = std::map<StreamKey, int64_t>;
struct StreamState {
  int64_t now = 0;
  Clock seen;
};
struct Access {
  StreamKey stream;
  int64_t tick;
  int64_t begin, end;  // bytes of the storage
  bool written;
  std::string name;
};
static std::mutex order_mutex;
static std::map<StreamKey, StreamState> streams;
static Clock host;                      // what the host has waited for; all that it launches later comes after it
static std::vector<std::string> races;  // found where nothing can be raised: in destructors

static StreamKey key(DeviceIndex device, c10::StreamId id) { return (static_cast<int64_t>(device) << 32) | id; }
static StreamKey current_stream(DeviceIndex device) { return key(device, current_streams[device]); }
static std::string name_of(StreamKey k) { return c10::str("stream ", k & 0xffffffff, " of cuda:", k >> 32); }
static void join(Clock& clock, const Clock& other) {
  for (auto& [stream, tick] : other) {
    auto& mine = clock[stream];
    mine = std::max(mine, tick);
  }
}
static Clock clock_of(StreamKey stream) {
  auto& state = streams[stream];
  Clock clock = state.seen;
  clock[stream] = state.now;
  return clock;
}
static bool knows(StreamKey stream, StreamKey other, int64_t tick) {
  if (stream == other) return true;
  auto has = [&](const Clock& c) { auto found = c.find(other); return found != c.end() && found->second >= tick; };
  return has(streams[stream].seen) || has(host);
}
// Freed memory goes to the next kernel of the stream that it was allocated on, which must not come before others have used it.
struct Freed {
  StreamKey user;
  int64_t tick;
  std::string what;
};
static std::map<StreamKey, std::vector<Freed>> freed;  // by the stream that has it
static int64_t launch(StreamKey stream) {
  auto found = freed.find(stream);
  if (found != freed.end()) {
    for (auto& f : found->second)
      if (!knows(stream, f.user, f.tick)) races.push_back(f.what);
    freed.erase(found);
  }
  return ++streams[stream].now;
}

// ---- CUDA graphs -----------------------------------------------------------------------------------------------------
// While a graph is captured, kernels on its streams leave memory as it was, and NaN in what they return; a replay runs them. Its
// streams are the one on which the capture began, and those that wait for events of such streams. What was allocated for it is its
// own until it ends; of other memory it has the address, and whoever has it must keep it.
struct Memory;
struct Graph {
  std::vector<std::function<void()>> nodes;
  StreamKey origin = 0;
  std::unordered_set<StreamKey> streams;
  std::vector<Memory*> freed;  // by the program, but not by the graph
  void clear();
  ~Graph() { clear(); }
};
static std::shared_ptr<Graph> capturing;
static bool captures(StreamKey stream) { return capturing && capturing->streams.count(stream); }

// ---- memory ----------------------------------------------------------------------------------------------------------
static std::atomic<int64_t> live_bytes{0}, peak_bytes{0};
struct Memory {  // the context of a device tensor's DataPtr
  void* data;
  size_t bytes;
  std::optional<c10::Storage> held;  // the CPU storage that a kernel has returned; else the memory is our own
  StreamKey home;                    // the stream that it was allocated on, to whose later kernels it goes when it is freed
  std::vector<Access> accesses;
  std::unordered_set<StreamKey> recorded;  // record_stream
  std::weak_ptr<Graph> graph;              // in whose memory it is

  Memory(void* data, size_t bytes, std::optional<c10::Storage> held, DeviceIndex device)
      : data(data), bytes(bytes), held(std::move(held)), home(current_stream(device)) {
    if (captures(home)) graph = capturing;
    int64_t now = (live_bytes += static_cast<int64_t>(bytes)), peak = peak_bytes.load();
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {}
  }
  static void free(void* context) {
    auto* memory = static_cast<Memory*>(context);
    if (auto owner = memory->graph.lock()) return owner->freed.push_back(memory);
    {
      std::lock_guard<std::mutex> guard(order_mutex);
      for (auto& a : memory->accesses)
        // Recorded streams are waited for, with all that they have waited for.
        if (a.stream != memory->home && !memory->recorded.count(a.stream) && !knows(memory->home, a.stream, a.tick) &&
            std::none_of(memory->recorded.begin(), memory->recorded.end(), [&](StreamKey s) { return knows(s, a.stream, a.tick); }))
          freed[memory->home].push_back({a.stream, a.tick, c10::str("memory of ", name_of(memory->home), " was freed while ", a.name,
                                         " on ", name_of(a.stream), " may still use it (record_stream, or wait for that stream first)")});
    }
    live_bytes -= static_cast<int64_t>(memory->bytes);
    if (!memory->held && memory->data) {
      memset(memory->data, 0xFF, memory->bytes);
      c10::free_cpu(memory->data);
    }
    delete memory;
  }
};
static void leave(void*) {}  // to its owner
static Memory* memory_of(const c10::Storage& storage) {
  auto& pointer = storage.data_ptr();
  bool is_ours = pointer.get_deleter() == &Memory::free || pointer.get_deleter() == &leave;
  return is_ours ? static_cast<Memory*>(pointer.get_context()) : nullptr;
}
void Graph::clear() {
  nodes.clear();
  for (auto* memory : std::exchange(freed, {})) {
    memory->graph.reset();
    Memory::free(memory);
  }
}

// Raises where `stream` touches memory that it has not waited for, and remembers what it does.
static void touch(const at::Tensor& t, StreamKey stream, int64_t tick, bool writes, const std::string& name) {
  if (!t.defined() || !t.is_cuda() || t.layout() != kStrided || !t.numel()) return;
  auto* memory = memory_of(t.storage());
  if (!memory) return;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  int64_t begin = t.storage_offset() * t.itemsize(), end = begin + (last + 1) * t.itemsize();
  std::lock_guard<std::mutex> guard(order_mutex);
  auto& accesses = memory->accesses;
  for (size_t i = 0; i < accesses.size();) {
    auto& a = accesses[i];
    bool overlaps = a.begin < end && begin < a.end;
    if (overlaps && (writes || a.written) && !knows(stream, a.stream, a.tick))
      TORCH_CHECK(false, "race: ", name, " on ", name_of(stream), writes ? " writes" : " reads", " what ", a.name, " on ", name_of(a.stream),
                  a.written ? " has written" : " has read", ", without waiting for it");
    bool superseded = a.stream == stream ? a.written == writes && a.begin >= begin && a.end <= end
                                         : writes && a.begin >= begin && a.end <= end;
    if (superseded) accesses.erase(accesses.begin() + i);
    else i++;
  }
  accesses.push_back({stream, tick, begin, end, writes, name});
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (data) memset(data, 0xFF, bytes);  // NaN, and not zero
    return {data, new Memory(data, bytes, std::nullopt, current_device), &Memory::free, Device(kCUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
static DeviceAllocator device_allocator;

struct PinnedAllocator final : c10::Allocator {
  static std::mutex mutex;
  static std::map<char*, size_t> blocks;
  static void free(void* data) {
    { std::lock_guard<std::mutex> guard(mutex); blocks.erase(static_cast<char*>(data)); }
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    { std::lock_guard<std::mutex> guard(mutex); blocks[static_cast<char*>(data)] = std::max<size_t>(bytes, 1); }
    return {data, data, &free, Device(kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  static bool holds(const void* pointer) {
    std::lock_guard<std::mutex> guard(mutex);
    auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (after == blocks.begin()) return false;
    --after;
    return static_cast<const char*>(pointer) < after->first + after->second;
  }
};
std::mutex PinnedAllocator::mutex;
std::map<char*, size_t> PinnedAllocator::blocks;
static PinnedAllocator pinned_allocator;

// ---- what the host waits for -----------------------------------------------------------------------------------------
// Copies between pinned memory and the device that the host has not waited for. A copy to the host ends when the host waits;
// of a copy to the device it is found out then whether the host has written to its source in the meantime.
struct PendingCopy {
  StreamKey stream;
  int64_t tick;
  at::Tensor host_side, value;
  bool to_host;
};
static std::deque<PendingCopy> pending;

static void finish_copy(const PendingCopy& c) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (c.to_host) c.host_side.copy_(c.value);
  else if (!at::equal(c.host_side.contiguous(), c.value) && !c.value.isnan().any().item<bool>())
    races.push_back(c10::str("pinned memory of ", c.host_side.sizes(), " was written to before ", name_of(c.stream), " had copied it to the device"));
}
static void host_waits(const Clock& clock) {
  std::deque<PendingCopy> ended;
  {
    std::lock_guard<std::mutex> guard(order_mutex);
    join(host, clock);
    for (auto it = pending.begin(); it != pending.end();) {
      auto found = host.find(it->stream);
      if (found != host.end() && found->second >= it->tick) {
        ended.push_back(*it);
        it = pending.erase(it);
      } else ++it;
    }
  }
  for (auto& c : ended) finish_copy(c);
}
static void refuse_in_capture(const std::string& what);
static void host_synchronizes(const Clock& clock, const std::string& what) {
  refuse_in_capture(what);
  count("sync", what);
  host_waits(clock);
}
static void host_synchronizes_stream(StreamKey stream, const std::string& what) {
  Clock clock;
  { std::lock_guard<std::mutex> guard(order_mutex); clock = clock_of(stream); }
  host_synchronizes(clock, what);
}
static void synchronize_device(DeviceIndex device) {
  Clock clock;
  {
    std::lock_guard<std::mutex> guard(order_mutex);
    for (auto& [stream, state] : streams)
      if (stream >> 32 == device) join(clock, clock_of(stream));
  }
  host_synchronizes(clock, "device.synchronize");
}

struct Event {
  Clock clock;
  std::shared_ptr<Graph> graph;  // in whose capture it was recorded
};
static std::atomic<int64_t> next_stream{1};
static bool capturing_now() { return captures(current_stream(current_device)); }

static void set_current(DeviceIndex d) {
  TORCH_CHECK(d < visible(), "CUDA error: invalid device ordinal");
  if (d >= 0) current_device = d;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device d) const override {
    Device before(kCUDA, current_device);
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  void setDevice(Device d) const override { set_current(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::UNSAFE, Device(kCUDA, index_of(d)), current_streams[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, Device(kCUDA, index_of(d))); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::UNSAFE, Device(kCUDA, index_of(d)), next_stream++); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    std::lock_guard<std::mutex> guard(order_mutex);
    auto stream = key(s.device_index(), s.id());
    static_cast<Event*>(*event)->clock = clock_of(stream);
    static_cast<Event*>(*event)->graph = captures(stream) ? capturing : nullptr;
  }
  void block(void* event, const Stream& s) const override {
    if (!event) return;
    std::lock_guard<std::mutex> guard(order_mutex);
    auto stream = key(s.device_index(), s.id());
    auto& graph = static_cast<Event*>(event)->graph;
    TORCH_CHECK(graph || !captures(stream), "CUDA error: dependency created on uncaptured work in another stream");
    TORCH_CHECK(!graph || graph == capturing, "CUDA error: operation not permitted on an event last recorded in a capturing stream");
    TORCH_CHECK(!graph || s.id(), "CUDA error: operation would make the legacy stream depend on a capturing blocking stream");
    if (graph) graph->streams.insert(stream);
    join(streams[stream].seen, static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock);
    return true;
  }
  bool queryStream(const Stream& s) const override {
    Clock clock;
    { std::lock_guard<std::mutex> guard(order_mutex); clock = clock_of(key(s.device_index(), s.id())); }
    host_waits(clock);
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return visible(); }
  bool isStreamCapturing(const Stream&) const { return capturing_now(); }  // no method of torch's before 2.13
  void synchronizeStream(const Stream& s) const override { host_synchronizes_stream(key(s.device_index(), s.id()), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override { if (event) host_synchronizes(static_cast<Event*>(event)->clock, "event.synchronize"); }
  void synchronizeDevice(DeviceIndex device) const override { synchronize_device(device); }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0; }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& s) const override {
    if (pointer.get_deleter() != &Memory::free) return;
    std::lock_guard<std::mutex> guard(order_mutex);
    static_cast<Memory*>(pointer.get_context())->recorded.insert(key(s.device_index(), s.id()));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- random numbers --------------------------------------------------------------------------------------------------
// As CUDA's, a generator is a seed and an offset that each kernel advances; a state is these 16 bytes.
struct DeviceGenerator final : c10::GeneratorImpl {
  uint64_t seed_, offset_ = 0;
  DeviceGenerator(DeviceIndex device, uint64_t seed) : c10::GeneratorImpl(Device(kCUDA, device), DispatchKeySet(DispatchKey::CUDA)), seed_(seed) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom(true)); return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = state.numel() == 16 ? words[1] : 0;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, kByte);
    memcpy(state.data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index(), seed_);
    copy->offset_ = offset_;
    return copy;
  }
  at::Generator next() {  // the numbers of one kernel
    auto mixed = (seed_ + 0x9E3779B97F4A7C15ull * (offset_ + 1)) * 0xBF58476D1CE4E5B9ull;
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }
};
static at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < DEVICES; i++) made.push_back(at::make_generator<DeviceGenerator>(i, c10::default_rng_seed_val));
    return made;
  }();
  return all[device < 0 ? current_device : device];
}
static at::Generator numbers_of(const at::Generator& g) { return static_cast<DeviceGenerator*>(g.unsafeGetGeneratorImpl())->next(); }

struct Hooks : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return visible(); }
  int getNumGPUs() const override { return visible(); }
  DeviceIndex current_device() const override { return emulated::current_device; }
  DeviceIndex getCurrentDevice() const override { return emulated::current_device; }
  void setCurrentDevice(DeviceIndex d) const override { set_current(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto before = emulated::current_device;
    if (d >= 0) emulated::current_device = d;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return PinnedAllocator::holds(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, emulated::current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<DeviceGenerator>(d < 0 ? emulated::current_device : d, c10::default_rng_seed_val);
  }
  void deviceSynchronize(DeviceIndex d) const override { synchronize_device(d); }
};
}  // namespace emulated
namespace at {
using emulated::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}
namespace emulated {

static void refuse_in_capture(const std::string& what) {
  TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

// ---- kernels ---------------------------------------------------------------------------------------------------------
// The tensors of one call: aliases on the CPU of device tensors, and back.
struct Call {
  std::unordered_map<c10::StorageImpl*, c10::Storage> on_cpu;  // by the device tensor's storage
  std::unordered_map<c10::StorageImpl*, at::Tensor> origin;    // by the CPU storage, a device tensor
  std::unordered_map<c10::TensorImpl*, at::Tensor> aliases;    // by the device tensor: kernels ask if an output is an input, too
  std::unordered_map<c10::TensorImpl*, at::Tensor> same;       // by the alias, its device tensor
  std::vector<std::pair<at::Tensor, at::Tensor>> written;      // device tensor, alias
  DeviceIndex device = -1;

  DeviceIndex where() const { return device < 0 ? current_device : device; }
  at::Tensor alias(const at::Tensor& t, bool is_written) {
    if (!t.defined() || !t.is_cuda() || t.layout() != kStrided) return t;
    if (device < 0) device = t.device().index();
    if (t._is_zerotensor()) return at::zeros(t.sizes(), t.options().device(kCPU));
    auto known = aliases.find(t.unsafeGetTensorImpl());
    if (known != aliases.end()) {
      if (is_written) written.emplace_back(t, known->second);
      return known->second;
    }
    auto* storage = t.storage().unsafeGetStorageImpl();
    auto found = on_cpu.find(storage);
    if (found == on_cpu.end()) {
      c10::Storage cpu(c10::Storage::use_byte_size_t{}, t.storage().nbytes(), c10::DataPtr(t.storage().mutable_data(), Device(kCPU)),
                       c10::GetAllocator(kCPU), true);
      found = on_cpu.emplace(storage, cpu).first;
      origin[cpu.unsafeGetStorageImpl()] = t;
    }
    auto a = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), DispatchKeySet(DispatchKey::CPU), t.dtype());
    a.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    a._set_conj(t.is_conj());
    a._set_neg(t.is_neg());
    if (is_written) written.emplace_back(t, a);
    same[a.unsafeGetTensorImpl()] = t;
    aliases[t.unsafeGetTensorImpl()] = a;
    return a;
  }
  at::Tensor back(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu() || result.layout() != kStrided) return result;
    auto given = same.find(result.unsafeGetTensorImpl());
    if (given != same.end()) return given->second;
    auto base = origin.find(result.storage().unsafeGetStorageImpl());
    if (base != origin.end()) return at::native::as_strided_tensorimpl(base->second, result.sizes(), result.strides(), result.storage_offset());
    auto t = at::detail::make_tensor<c10::TensorImpl>(on_device(result.storage(), where()), DispatchKeySet(DispatchKey::CUDA), result.dtype());
    t.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    t._set_conj(result.is_conj());
    t._set_neg(result.is_neg());
    return t;
  }
  static c10::Storage on_device(const c10::Storage& cpu, DeviceIndex device) {
    auto* memory = new Memory(cpu.mutable_data(), cpu.nbytes(), cpu, device);
    return c10::Storage(c10::Storage::use_byte_size_t{}, cpu.nbytes(), c10::DataPtr(cpu.mutable_data(), memory, &Memory::free, Device(kCUDA, device)),
                        &device_allocator, true);
  }
  void take_resized() {
    for (auto& [t, a] : written) {
      if (a.storage().data() != t.storage().data() || a.storage().nbytes() != t.storage().nbytes())
        t.unsafeGetTensorImpl()->set_storage_keep_dtype(on_device(a.storage(), t.device().index()));
      if (a.sizes() != t.sizes() || a.strides() != t.strides())
        t.unsafeGetTensorImpl()->set_sizes_and_strides(a.sizes(), a.strides(), a.storage_offset());
    }
  }
};

template <class F>
static void for_each_tensor(const c10::IValue& v, F f) {
  if (v.isTensor()) f(v.toTensor());
  else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorList()) f(t);
  else if (v.isOptionalTensorList()) for (const std::optional<at::Tensor>& t : v.toOptionalTensorList()) { if (t) f(*t); }
}
template <class F>
static c10::IValue map_tensors(const c10::IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : v.toTensorList()) made.push_back(f(t));
    return made;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList()) made.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return made;
  }
  return v;
}

// Operators whose CUDA kernels have the host wait for a number on the device (their outputs' sizes, or whether they succeeded).
static const std::unordered_set<std::string> SYNCHRONIZING = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique2", "aten::_unique",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount",
    "aten::repeat_interleave.Tensor", "aten::_ctc_loss.Tensor", "aten::_linalg_check_errors", "aten::linalg_lstsq",
    "aten::_linalg_eigh", "aten::linalg_eig", "aten::linalg_eig.out", "aten::histc"};
static const std::unordered_set<std::string> INDEXING = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"};

static std::unordered_set<std::string> unchecked;  // operators with device_check: NoCheck, which take numbers from the CPU
static std::unordered_set<std::string> contracted;
static PyObject* check_contract = nullptr;

// torch's kernels for CUDA raise on tensors of two devices; numbers from the CPU are arguments of kernels made for TensorIterator.
static void check_devices(const std::string& name, const c10::Argument& argument, const c10::IValue& value, DeviceIndex& device) {
  for_each_tensor(value, [&](const at::Tensor& t) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      if (device < 0) device = t.device().index();
      if (device != t.device().index()) count("mix", name);
      TORCH_CHECK(device == t.device().index(), "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                  static_cast<int>(device), " and ", t.device(), "! (", name, ", argument ", argument.name(), ")");
      return;
    }
    if (!t.device().is_cpu() || t.unsafeGetTensorImpl()->is_wrapped_number()) return;
    if (INDEXING.count(name) && argument.name() == "indices") {
      count("h2d", "index");
      host_synchronizes_stream(current_stream(current_device), name);
      return;
    }
    if (t.dim() == 0 && (unchecked.count(name) || name.rfind("aten::_foreach", 0) == 0 || name.rfind("aten::_fused", 0) == 0)) return;
    count("mix", name);
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! (", name, ", argument ",
                argument.name(), ")");
  });
}

// A tensor of a node, by its memory's address: the program may give its storage other memory.
struct Kept {
  at::Tensor tensor;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> others;
  explicit Kept(const at::Tensor& t) : tensor(t) {
    auto* memory = t.defined() && t.is_cuda() && t.layout() == kStrided && !t._is_zerotensor() ? memory_of(t.storage()) : nullptr;
    if (!memory) return;
    if (memory->graph.lock() != capturing) others.emplace(c10::Storage(t.storage()).getWeakStorageImpl());
    c10::DataPtr address(memory->data, memory, &leave, t.device());
    c10::Storage storage(c10::Storage::use_byte_size_t{}, t.storage().nbytes(), std::move(address), &device_allocator, true);
    tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), t.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    tensor._set_conj(t.is_conj());
    tensor._set_neg(t.is_neg());
  }
  at::Tensor get(const std::string& name) const {
    if (!others) return tensor;
    auto storage = others->lock();
    TORCH_CHECK(storage && storage->data() == tensor.storage().data(), name,
                " in a graph uses memory that was allocated outside of the capture, and has been freed");
    return tensor;
  }
};
static at::Tensor in_graph(const at::Tensor& t) { return captures(current_stream(t.device().index())) ? Kept(t).tensor : t; }
template <class I>
static torch::jit::Stack without_tensors(I begin, I end, std::vector<Kept>& kept) {
  torch::jit::Stack values;
  for (; begin != end; ++begin)
    values.push_back(map_tensors(*begin, [&](const at::Tensor& t) { kept.emplace_back(t); return at::Tensor(); }));
  return values;
}
static torch::jit::Stack with_tensors(const torch::jit::Stack& values, const std::vector<Kept>& kept, const std::string& name) {
  torch::jit::Stack made;
  size_t i = 0;
  for (auto& v : values) made.push_back(map_tensors(v, [&](const at::Tensor&) { return kept[i++].get(name); }));
  return made;
}

static void kernel(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto begin = stack->size() - arguments.size();
  std::string name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();

  DeviceIndex device = -1;
  bool synchronizes = SYNCHRONIZING.count(name);
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& v = (*stack)[begin + i];
    check_devices(name, arguments[i], v, device);
    if (v.isDevice() && v.toDevice().is_cuda() && device < 0) device = v.toDevice().index();
  }
  if (device < 0) device = current_device;
  if (contracted.count(name)) {
    pybind11::gil_scoped_acquire gil;
    pybind11::tuple given(arguments.size());
    for (size_t i = 0; i < arguments.size(); i++) given[i] = torch::jit::toPyObject((*stack)[begin + i]);
    pybind11::handle check{check_contract};
    check(name, given);
  }
  auto stream = current_stream(device);
  if (synchronizes) host_synchronizes_stream(stream, name);
  count("kernel", name);

  bool captured = captures(stream);
  std::vector<Kept> operands;
  torch::jit::Stack recorded;
  if (captured) recorded = without_tensors(stack->begin() + begin, stack->end(), operands);
  int64_t tick;
  { std::lock_guard<std::mutex> guard(order_mutex); tick = launch(stream); }
  Call call;
  call.device = device;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& v = (*stack)[begin + i];
    const auto& argument = arguments[i];
    bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    for_each_tensor(v, [&](const at::Tensor& t) { touch(t, stream, tick, is_written, name); });
    if (v.isDevice()) {
      if (v.toDevice().is_cuda()) v = Device(kCPU);
    } else if (v.isGenerator()) {
      auto g = v.toGenerator();
      TORCH_CHECK(g.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", g.device(), "' (", name, ")");
      v = numbers_of(g);
    } else if (v.isNone() && argument.name() == "generator") {
      v = numbers_of(default_generator(device));
    } else if (!v.isNone()) {
      v = map_tensors(v, [&](const at::Tensor& t) { return call.alias(t, is_written); });
    }
  }
  std::vector<std::pair<void*, std::vector<char>>> before;  // all memory, as schemas do not tell of all that is written
  if (captured)
    for (auto& [storage, alias] : call.on_cpu) {
      auto* data = static_cast<char*>(storage->mutable_data());
      before.emplace_back(data, std::vector<char>(data, data + storage->nbytes()));
    }
  static const std::unordered_set<std::string> DRAWING = {"aten::native_dropout", "aten::rrelu_with_noise"};
  {
    at::AutoDispatchBelowADInplaceOrView below;
    if (DRAWING.count(name)) {  // which take no generator, but draw
      auto cpu = at::globalContext().defaultGenerator(kCPU);
      auto state = cpu.get_state();
      cpu.set_current_seed(numbers_of(default_generator(device)).current_seed());
      op.callBoxed(stack);
      cpu.set_state(state);
    } else {
      op.callBoxed(stack);
    }
    for (auto& [data, bytes] : before) std::copy(bytes.begin(), bytes.end(), static_cast<char*>(data));
  }
  call.take_resized();
  if (counting) {
    int64_t bytes = 0;
    for (auto& [alias, t] : call.same) bytes += std::min<int64_t>(t.numel() * t.itemsize(), t.storage().nbytes());
    moved_bytes += bytes;
  }
  const auto returned = schema.returns().size();
  for (size_t i = stack->size() - returned; i < stack->size(); i++) {
    auto& v = (*stack)[i];
    v = map_tensors(v, [&](const at::Tensor& r) {
      bool is_new = r.defined() && r.device().is_cpu() && !call.same.count(r.unsafeGetTensorImpl());
      auto t = call.back(r);
      if (is_new && t.is_cuda() && !call.origin.count(r.storage().unsafeGetStorageImpl())) {
        if (counting) moved_bytes += t.nbytes();
        touch(t, stream, tick, true, name);
        if (captured && r.storage().nbytes()) memset(r.storage().mutable_data(), 0xFF, r.storage().nbytes());
      }
      return t;
    });
  }
  if (captured) {
    std::vector<Kept> results;
    without_tensors(stack->end() - returned, stack->end(), results);
    capturing->nodes.push_back([op, keys, name, recorded, operands, results, returned]() {
      auto again = with_tensors(recorded, operands, name);
      kernel(op, keys, &again);
      std::vector<at::Tensor> made;
      for (size_t i = again.size() - returned; i < again.size(); i++)
        for_each_tensor(again[i], [&](const at::Tensor& t) { made.push_back(t); });
      for (size_t j = 0; j < results.size(); j++) {
        auto kept = results[j].get(name);
        if (!kept.defined() || !kept.is_cuda() || kept.storage().data() == made[j].storage().data()) continue;
        Call copy;
        at::AutoDispatchBelowADInplaceOrView below;
        copy.alias(kept, true).copy_(copy.alias(made[j], false));
      }
    });
  }
}

// ---- what is no ordinary kernel --------------------------------------------------------------------------------------
static at::Tensor empty(c10::IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                        std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}
static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                                std::optional<Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}
static at::Tensor efficient_zero(c10::IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout> layout, std::optional<Device> device,
                                 std::optional<bool> pin) {
  auto t = empty(size, dtype, layout, device, pin, std::nullopt);
  return t.zero_();
}
static at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  bool to_device = self.is_cuda() && src.device().is_cpu(), to_host = self.device().is_cpu() && src.is_cuda();
  bool pinned = (to_device || to_host) && PinnedAllocator::holds((to_device ? src : self).storage().data());
  auto device = (self.is_cuda() ? self : src).device().index();
  auto stream = current_stream(device);
  bool waits = self.numel() && (to_device || to_host) && !(non_blocking && pinned);
  if (self.numel() && (to_device || to_host))
    count(to_device ? "h2d" : "d2h", c10::str(non_blocking ? "non_blocking" : "blocking", pinned ? " pinned" : " pageable"));
  else if (self.numel()) count("kernel", "aten::copy_");
  if (waits) refuse_in_capture(to_device ? "copy from the host" : "copy to the host");
  if (self.is_cuda() && src.is_cuda() && self.device() != src.device()) {  // torch has the two streams wait for each other
    std::lock_guard<std::mutex> guard(order_mutex);
    auto other = current_stream(self.device().index()), mine = current_stream(src.device().index());
    join(streams[mine].seen, clock_of(other));
    join(streams[other].seen, clock_of(mine));
  }
  int64_t tick;
  { std::lock_guard<std::mutex> guard(order_mutex); tick = launch(stream); }
  touch(src, stream, tick, false, "copy_");
  touch(self, stream, tick, true, "copy_");
  if (counting) moved_bytes += static_cast<int64_t>(self.nbytes() + src.nbytes());
  if (captures(stream)) {
    capturing->nodes.push_back([to = Kept(self), from = Kept(src), non_blocking]() {
      auto written = to.get("copy_");
      copy_(written, from.get("copy_"), non_blocking);
    });
    return self;
  }
  Call call;
  auto to = call.alias(self, false), from = call.alias(src, false);
  at::AutoDispatchBelowADInplaceOrView below;
  if (pinned && non_blocking) {
    PendingCopy copy{stream, tick, to_host ? to : from, from.contiguous().clone(), to_host};
    if (to_host) memset(self.storage().mutable_data(), 0xFF, self.storage().nbytes());
    else to.copy_(from);
    std::lock_guard<std::mutex> guard(order_mutex);
    pending.push_back(copy);
    return self;
  }
  to.copy_(from);
  if (waits) host_synchronizes_stream(stream, c10::str(to_device ? "copy from" : "copy to", " the host"));
  return self;
}
static at::Scalar local_scalar(const at::Tensor& self) {
  auto stream = current_stream(self.device().index());
  int64_t tick;
  { std::lock_guard<std::mutex> guard(order_mutex); tick = launch(stream); }
  touch(self, stream, tick, false, "aten::_local_scalar_dense");
  host_synchronizes_stream(stream, "aten::_local_scalar_dense");
  Call call;
  return at::_local_scalar_dense(call.alias(self, false));
}
static at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {size}, {});
}
static void record_stream(at::Tensor& self, at::Stream s) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), s); }

// On CUDA the bias's gradient is a sum beside the kernel (aten/src/ATen/native/Convolution.cpp).
static void convolution_backward(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  auto mask = stack->back().toBoolList();
  const at::Tensor grad = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  const bool of_bias = mask.get(2);
  if (of_bias) stack->back() = c10::List<bool>({mask.get(0), mask.get(1), false});
  kernel(op, keys, stack);
  if (!of_bias) return;
  std::vector<int64_t> others{0};
  for (int64_t d = 2; d < grad.dim(); d++) others.push_back(d);
  at::AutoDispatchBelowADInplaceOrView below;
  stack->back() = grad.sum(others);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_use_cudnn_ctc_loss", [](const at::Tensor&, const at::Tensor&, c10::IntArrayRef, c10::IntArrayRef, int64_t) { return false; });
  for (const char* name : {"_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss.Tensor"})
    try {
      m.impl(name, [](const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) { return false; });
    } catch (const c10::Error&) {}  // not in all versions of torch
  try {
    m.impl("_use_miopen_ctc_loss", [](const at::Tensor&, const at::Tensor&, c10::IntArrayRef, c10::IntArrayRef, int64_t) { return false; });
  } catch (const c10::Error&) {}
  // CUDA has a kernel of its own for these, where the CPU has several.
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  for (const char* name : {"convolution", "_convolution", "native_group_norm", "native_group_norm_backward", "native_layer_norm",
                           "native_layer_norm_backward", "grid_sampler_2d", "grid_sampler_3d", "_fft_r2c", "_fft_c2r", "_fft_c2c",
                           "repeat_interleave.Tensor", "isclose", "_embedding_bag", "linalg_vector_norm", "stack", "cat", "trace", "native_dropout",
                           "_foreach_copy_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

// ---- NCCL ------------------------------------------------------------------------------------------------------------
// Communication by gloo under NCCL's rules: tensors on one device, dense, of NCCL's dtypes, in memory without gaps; the same calls in
// the same order on all ranks of a communicator, whose first call is everybody's; it runs on a stream of its own, and whoever needs the
// result has its stream wait(). Until then results are NaN. A failure is no exception in wait(): the watchdog ends the process.
static const std::unordered_set<ScalarType> NCCL_DTYPES = {kChar, kByte, kFloat, kDouble, kInt, kLong, kHalf, kBool, kBFloat16,
                                                           kFloat8_e4m3fn, kFloat8_e5m2};
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Timeout = std::chrono::milliseconds;

static at::Tensor on_host(const at::Tensor& t) {  // its values, in memory of the same strides
  Call call;
  at::AutoDispatchBelowADInplaceOrView below;
  return call.alias(t, false).clone(at::MemoryFormat::Preserve);
}
static at::Tensor flat(const at::Tensor& t) { return t.as_strided({t.numel()}, {1}, t.storage_offset()); }
static at::Tensor as_bytes(const at::Tensor& t) { return flat(t.is_complex() ? at::view_as_real(t) : t).view(kByte); }
static void poison(const at::Tensor& t) {
  if (!t.numel()) return;
  Call call;
  at::AutoDispatchBelowADInplaceOrView below;
  auto a = call.alias(t, false);
  if (a.is_floating_point() || a.is_complex()) a.fill_(NAN);
  else if (a.scalar_type() != kBool) a.fill_(-1);
}
[[noreturn]] static void watchdog(const std::string& name, const std::string& why) {
  fprintf(stderr, "[emulated NCCL] watchdog: %s failed, and the process is ended: %s\n", name.c_str(), why.c_str());
  fflush(stderr);
  std::abort();
}

struct DeviceWork : c10d::Work {
  std::string name;
  StreamKey stream;
  int64_t tick = 0;
  WorkPtr compared;             // of what the ranks are about to do
  at::Tensor mine, everybodys;  // as numbers
  std::vector<WorkPtr> parts;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // on the device, received on the host
  std::vector<at::Tensor> inputs;                          // kept until wait(), as by NCCL
  std::mutex mutex;
  bool ended = false;
  std::shared_ptr<bool> broken;  // whether its communicator is: ranks have called different collectives

  DeviceWork(int rank, c10d::OpType type, std::string name, StreamKey stream) : c10d::Work(rank, type), name(std::move(name)), stream(stream) {}
  ~DeviceWork() override { if (!ended) count("unwaited", name); }
  void reads(const at::Tensor& t) { touch(t, stream, tick, false, name); inputs.push_back(t); }
  void writes(const at::Tensor& t, const at::Tensor& received) {
    touch(t, stream, tick, true, name);
    outputs.emplace_back(t, received);
    poison(t);
  }
  bool isCompleted() override {
    count("polled", name);
    for (auto& part : parts) if (!part->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(Timeout(0)); }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> made;
    for (auto& o : outputs) made.push_back(o.first);
    return made;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(Timeout(0));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(result()));
    return future;
  }
  bool wait(Timeout) override {
    std::lock_guard<std::mutex> guard(mutex);
    if (!ended) {
      auto finish = [&](WorkPtr& part) {
        try { part->wait(); } catch (const std::exception& error) { watchdog(name, error.what()); }
      };
      ended = true;
      if (compared) {
        finish(compared);
        for (int64_t r = 0; r < everybodys.numel(); r++) {
          *broken |= everybodys[r].item<int64_t>() != mine.item<int64_t>();
          TORCH_CHECK(everybodys[r].item<int64_t>() == mine.item<int64_t>(), "emulated NCCL: ranks call different collectives on one communicator: this rank ", name,
                      ", which is not what rank ", r, " of the group calls");
        }
      }
      for (auto& part : parts) finish(part);
      at::AutoDispatchBelowADInplaceOrView below;
      for (auto& [t, received] : outputs) {
        Call call;
        call.alias(t, false).copy_(received);
      }
      parts.clear();
    }
    {
      std::lock_guard<std::mutex> order(order_mutex);
      join(streams[current_stream(static_cast<DeviceIndex>(stream >> 32))].seen, ends);
    }
    inputs.clear();
    return true;
  }
  Clock ends;  // of its stream, at its end
};

struct Options : c10d::Backend::Options {
  bool is_high_priority_stream;
  explicit Options(bool high) : c10d::Backend::Options("nccl"), is_high_priority_stream(high) {}
};

struct Nccl : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options;
  std::optional<Device> device;
  c10::StreamId stream_id;
  bool connected = false, coalescing = false;
  c10::intrusive_ptr<DeviceWork> batch;
  uint64_t calls = 0;
  std::shared_ptr<bool> broken = std::make_shared<bool>(false);

  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<Options> options)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)), options(std::move(options)), stream_id(next_stream++) {}
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls; }
  void setTimeout(Timeout t) override { gloo->setTimeout(t); }
  void shutdown() override { gloo->shutdown(); }
  void abort() override { gloo->abort(); }

  void check(const at::Tensor& t, const char* name) {
    TORCH_CHECK(t.is_cuda() && !t.is_sparse(), "Tensors must be CUDA and dense (", name, ", on ", t.device(), ")");
    TORCH_CHECK(t.is_contiguous(t.suggest_memory_format()), "Tensors must be contiguous (", name, ", sizes ", t.sizes(), ", strides ", t.strides(), ")");
    TORCH_CHECK(NCCL_DTYPES.count(t.scalar_type()), "Input tensor data type is not supported for NCCL process group: ", t.scalar_type());
    if (!device) device = t.device();
    TORCH_CHECK(*device == t.device(), name, ": a communicator of ", *device, " got a tensor on ", t.device());
  }
  // Starts a call on the communicator's stream, after what the current stream has been given so far. `same` are numbers that all ranks
  // have to agree on.
  c10::intrusive_ptr<DeviceWork> start(c10d::OpType type, const char* name, std::vector<int64_t> same) {
    auto on = device ? device->index() : current_device;
    auto stream = key(on, stream_id);
    TORCH_CHECK(!*broken, "emulated NCCL: ranks have called different collectives on this communicator (now ", name, ")");
    auto work = c10::make_intrusive<DeviceWork>(getRank(), type, name, stream);
    work->broken = broken;
    count("nccl", name);
    calls++;
    if (!connected) {  // ncclCommInitRank
      connected = true;
      try { gloo->barrier()->wait(); } catch (const std::exception& error) { watchdog(name, error.what()); }
    }
    {
      std::lock_guard<std::mutex> guard(order_mutex);
      join(streams[stream].seen, clock_of(current_stream(on)));
      join(streams[stream].seen, host);
      work->tick = launch(stream);
      work->ends = clock_of(stream);
    }
    if (!same.empty()) {
      int64_t digest = static_cast<int64_t>(type);
      for (auto number : same) digest = digest * 1000003 + number;
      auto numbers = at::TensorOptions().dtype(kLong).device(kCPU);
      work->mine = at::full({1}, digest, numbers);
      work->everybodys = at::empty({getSize()}, numbers);
      work->compared = gloo->_allgather_base(work->everybodys, work->mine);
    }
    return work;
  }
  static int64_t dtype(const at::Tensor& t) { return static_cast<int64_t>(t.scalar_type()); }
  // In a graph, a call is a node that starts it anew, and fills what the capture has returned.
  template <class F>
  WorkPtr recorded(const char* name, std::vector<at::Tensor> outputs, F call) {
    if (!captures(current_stream(device->index()))) return call();
    auto graph = capturing;
    auto latest = std::make_shared<WorkPtr>();
    graph->nodes.push_back([call, latest]() { *latest = call(); });
    auto work = c10::make_intrusive<CapturedWork>(getRank(), name);
    work->graph = graph;
    work->latest = latest;
    for (auto& t : outputs) poison(t);
    work->outputs = std::move(outputs);
    return work;
  }
  struct CapturedWork : c10d::Work {
    std::shared_ptr<Graph> graph;
    std::shared_ptr<WorkPtr> latest;
    std::string name;
    std::vector<at::Tensor> outputs;
    CapturedWork(int rank, std::string name) : c10d::Work(rank), name(std::move(name)) {}
    bool isCompleted() override { refuse_in_capture("query of " + name); return true; }
    bool wait(Timeout) override {
      auto work = latest;
      graph->nodes.push_back([work]() { (*work)->wait(); });
      return true;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
      wait(Timeout(0));
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future->markCompleted(c10::IValue(outputs));
      return future;
    }
  };

  WorkPtr allreduce(std::vector<at::Tensor>& ts, const c10d::AllreduceOptions& o) override {
    TORCH_CHECK(ts.size() == 1, "Expecting one tensor only but got multiple");
    auto t = in_graph(ts[0]);
    if (t.is_complex()) {
      TORCH_CHECK(o.reduceOp == c10d::ReduceOp::SUM || o.reduceOp == c10d::ReduceOp::AVG, "all_reduce does not support this operation on complex tensors");
      t = at::view_as_real(t);
    }
    check(t, "allreduce");
    return recorded("allreduce", {t}, [this, t, op = o.reduceOp]() -> WorkPtr {
      auto work = start(c10d::OpType::ALLREDUCE, "allreduce", {t.numel(), dtype(t), static_cast<int64_t>(op.op_)});
      work->reads(t);
      auto staged = on_host(t);
      work->writes(t, staged);
      reduce_on_host(*work, staged, op);
      return work;
    });
  }
  void reduce_on_host(DeviceWork& work, const at::Tensor& staged, const c10d::ReduceOp& op) {
    c10d::AllreduceOptions options;
    bool mean = op == c10d::ReduceOp::AVG;
    options.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    std::vector<at::Tensor> flattened{flat(staged)};
    work.parts.push_back(gloo->allreduce(flattened, options));
    if (mean) {
      work.parts.back()->wait();
      staged.div_(getSize());
    }
  }
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& ts, const c10d::AllreduceCoalescedOptions& o) override {
    for (auto& t : ts) {
      check(t, "allreduce_coalesced");
      TORCH_CHECK(t.scalar_type() == ts[0].scalar_type(), "Tensors must have identical type");
    }
    return recorded("allreduce_coalesced", ts, [this, ts, op = o.reduceOp]() -> WorkPtr {
      auto work = start(c10d::OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", {static_cast<int64_t>(ts.size()), dtype(ts[0])});
      for (auto& t : ts) {
        work->reads(t);
        auto staged = on_host(t);
        work->writes(t, staged);
        reduce_on_host(*work, staged, op);
      }
      return work;
    });
  }
  WorkPtr reduce(std::vector<at::Tensor>& ts, const c10d::ReduceOptions& o) override {
    auto t = in_graph(ts[0]);
    check(t, "reduce");
    return recorded("reduce", {}, [this, t, o]() -> WorkPtr {
      auto work = start(c10d::OpType::REDUCE, "reduce", {t.numel(), dtype(t), o.rootRank});
      work->reads(t);
      auto staged = on_host(t);
      if (o.rootRank == getRank()) work->writes(t, staged);
      reduce_on_host(*work, staged, o.reduceOp);
      return work;
    });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& ts, const c10d::BroadcastOptions& o) override {
    auto t = in_graph(ts[0]);
    check(t, "broadcast");
    return recorded("broadcast", {}, [this, t, root = o.rootRank]() -> WorkPtr {
      auto work = start(c10d::OpType::BROADCAST, "broadcast", {t.numel(), dtype(t), root});
      auto staged = on_host(t);
      if (root == getRank()) work->reads(t);
      else work->writes(t, staged);
      c10d::BroadcastOptions options;
      options.rootRank = root;
      std::vector<at::Tensor> bytes{as_bytes(staged)};
      work->parts.push_back(gloo->broadcast(bytes, options));
      return work;
    });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    check(in, "_allgather_base");
    check(out, "_allgather_base");
    TORCH_CHECK(in.dtype() == out.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(in.numel() * getSize() == out.numel(), "output tensor size must be equal to world_size times input tensor size");
    return recorded("_allgather_base", {out}, [this, out = in_graph(out), in = in_graph(in)]() -> WorkPtr {
      auto work = start(c10d::OpType::_ALLGATHER_BASE, "_allgather_base", {in.numel(), dtype(in)});
      auto sent = on_host(in);
      work->reads(in);
      auto received = on_host(out);
      work->writes(out, received);
      auto to = as_bytes(received), from = as_bytes(sent);
      work->parts.push_back(gloo->_allgather_base(to, from));
      return work;
    });
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins, const c10d::AllgatherOptions& o) override {
    std::vector<WorkPtr> all;
    for (size_t i = 0; i < outs.size(); i++) all.push_back(_allgather_base(outs[i], ins[i], o));
    for (size_t i = 0; i + 1 < all.size(); i++) all[i]->wait();
    return all.back();
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outs, std::vector<at::Tensor>& ins, const c10d::AllgatherOptions&) override {
    auto in = ins[0];
    auto out = outs[0];
    check(in, "allgather");
    for (auto& t : out) check(t, "allgather");
    return recorded("allgather", out, [this, out, in]() -> WorkPtr {
      auto work = start(c10d::OpType::ALLGATHER, "allgather", {dtype(in)});
      std::vector<std::vector<at::Tensor>> to(1);
      std::vector<at::Tensor> from{as_bytes(on_host(in))};
      work->reads(in);
      for (auto& t : out) {
        auto received = on_host(t);
        to[0].push_back(as_bytes(received));
        work->writes(t, received);
      }
      work->parts.push_back(gloo->allgather(to, from));
      return work;
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    check(in, "_reduce_scatter_base");
    check(out, "_reduce_scatter_base");
    return recorded("_reduce_scatter_base", {out}, [this, out = in_graph(out), in = in_graph(in), op = o.reduceOp]() -> WorkPtr {
      auto work = start(c10d::OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base", {in.numel(), dtype(in)});
      auto staged = on_host(in);
      work->reads(in);
      reduce_on_host(*work, staged, op);
      work->writes(out, flat(staged).narrow(0, getRank() * out.numel(), out.numel()).view(out.sizes()));
      return work;
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins, const c10d::ReduceScatterOptions& o) override {
    std::vector<WorkPtr> all;
    for (size_t i = 0; i < outs.size(); i++) all.push_back(_reduce_scatter_base(outs[i], ins[i], o));
    for (size_t i = 0; i + 1 < all.size(); i++) all[i]->wait();
    return all.back();
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions&) override {
    check(in, "alltoall_base");
    check(out, "alltoall_base");
    auto in_bytes = [](const at::Tensor& t, std::vector<int64_t> splits) {
      int64_t row = t.dim() && t.size(0) ? static_cast<int64_t>(t.nbytes()) / t.size(0) : 0;
      for (auto& rows : splits) rows *= row;
      return splits;
    };
    return recorded("alltoall_base", {out}, [this, out = in_graph(out), in = in_graph(in), to_splits = in_bytes(out, out_splits), from_splits = in_bytes(in, in_splits)]() -> WorkPtr {
      auto work = start(c10d::OpType::ALLTOALL_BASE, "alltoall_base", {dtype(in)});
      auto sent = on_host(in);
      work->reads(in);
      auto received = on_host(out);
      work->writes(out, received);
      auto to = as_bytes(received), from = as_bytes(sent);
      auto to_sizes = to_splits, from_sizes = from_splits;
      work->parts.push_back(gloo->alltoall_base(to, from, to_sizes, from_sizes));
      return work;
    });
  }
  WorkPtr scatter(std::vector<at::Tensor>& outs, std::vector<std::vector<at::Tensor>>& ins, const c10d::ScatterOptions& o) override {
    auto work = start(c10d::OpType::SCATTER, "scatter", {dtype(outs[0]), o.rootRank});
    check(outs[0], "scatter");
    auto received = on_host(outs[0]);
    std::vector<std::vector<at::Tensor>> from;
    if (!ins.empty()) {
      from.emplace_back();
      for (auto& t : ins[0]) {
        check(t, "scatter");
        from[0].push_back(as_bytes(on_host(t)));
        work->reads(t);
      }
    }
    work->writes(outs[0], received);
    std::vector<at::Tensor> to{as_bytes(received)};
    c10d::ScatterOptions options;
    options.rootRank = o.rootRank;
    work->parts.push_back(gloo->scatter(to, from, options));
    return work;
  }
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outs, std::vector<at::Tensor>& ins, const c10d::GatherOptions& o) override {
    auto work = start(c10d::OpType::GATHER, "gather", {dtype(ins[0]), o.rootRank});
    check(ins[0], "gather");
    std::vector<at::Tensor> from{as_bytes(on_host(ins[0]))};
    work->reads(ins[0]);
    std::vector<std::vector<at::Tensor>> to;
    if (!outs.empty()) {
      to.emplace_back();
      for (auto& t : outs[0]) {
        check(t, "gather");
        auto received = on_host(t);
        to[0].push_back(as_bytes(received));
        work->writes(t, received);
      }
    }
    c10d::GatherOptions options;
    options.rootRank = o.rootRank;
    work->parts.push_back(gloo->gather(to, from, options));
    return work;
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto work = start(c10d::OpType::BARRIER, "barrier", {});
    work->parts.push_back(gloo->barrier());
    return work;
  }

  // Between two ranks. Unless they are coalesced, NCCL makes a communicator for each pair of ranks that talks.
  struct Nothing : c10d::Work {
    explicit Nothing(int rank) : c10d::Work(rank) {}
    bool isCompleted() override { return true; }
    bool wait(Timeout) override { return true; }
  };
  std::vector<std::function<void(DeviceWork&)>> in_batch;
  std::vector<at::Tensor> received_in_batch;
  void message(DeviceWork& work, const at::Tensor& t, int peer, bool sends) {
    auto staged = on_host(t);
    std::vector<at::Tensor> bytes{as_bytes(staged)};
    if (sends) {
      work.reads(t);
      work.parts.push_back(gloo->send(bytes, peer, 0));
    } else {
      work.writes(t, staged);
      work.parts.push_back(gloo->recv(bytes, peer, 0));
    }
  }
  WorkPtr message(const at::Tensor& given, int peer, bool sends) {
    auto t = in_graph(given);
    const char* name = sends ? "send" : "recv";
    check(t, name);
    TORCH_CHECK(peer != getRank(), "Invalid ", sends ? "destination" : "source", " rank: a rank's own");
    if (coalescing) {
      count("message", name);
      in_batch.push_back([this, t, peer, sends](DeviceWork& work) { message(work, t, peer, sends); });
      if (!sends) received_in_batch.push_back(t);
      return c10::make_intrusive<Nothing>(getRank());
    }
    count("message alone", name);
    bool was_connected = std::exchange(connected, true);  // the pair's communicator concerns no other rank
    auto work = recorded(name, sends ? std::vector<at::Tensor>{} : std::vector<at::Tensor>{t}, [this, t, peer, sends, name]() -> WorkPtr {
      auto started = start(sends ? c10d::OpType::SEND : c10d::OpType::RECV, name, {});
      message(*started, t, peer, sends);
      return started;
    });
    connected = was_connected;
    return work;
  }
  WorkPtr send(std::vector<at::Tensor>& ts, int peer, int) override { return message(ts[0], peer, true); }
  WorkPtr recv(std::vector<at::Tensor>& ts, int peer, int) override { return message(ts[0], peer, false); }
  void startCoalescing() override { coalescing = true; }
  WorkPtr endCoalescing() override {
    coalescing = false;
    auto messages = std::exchange(in_batch, {});
    return recorded("messages", std::exchange(received_in_batch, {}), [this, messages]() -> WorkPtr {
      auto work = start(c10d::OpType::COALESCED, "messages", {});
      for (auto& each : messages) each(*work);
      return work;
    });
  }
};

// DistributedDataParallel asks for one of each type of device.
struct DeviceTimer : c10d::Timer {
  explicit DeviceTimer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

static void resize_storage(const at::Tensor& t, int64_t bytes) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  OnDevice on(t.device());
  auto data = device_allocator.allocate(bytes);
  if (auto kept = std::min<size_t>(bytes, storage->nbytes())) memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

struct RegisterAllocator {
  RegisterAllocator() { c10::SetAllocator(kCUDA, &device_allocator, 100); }
};
static RegisterAllocator register_allocator;
}  // namespace emulated
namespace c10d {
using emulated::DeviceTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, DeviceTimer)
}

namespace py = pybind11;
template <class T>
using Pointer = c10::intrusive_ptr<T>;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  py::module::import("torch._C._distributed_c10d");
  py::class_<Options, c10d::Backend::Options, Pointer<Options>>(m, "Options")
      .def(py::init([](bool high) { return c10::make_intrusive<Options>(high); }), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
  py::class_<Nccl, c10d::Backend, Pointer<Nccl>>(m, "ProcessGroupNCCL")
      .def(py::init([](Pointer<c10d::Backend> gloo, Pointer<Options> options) { return c10::make_intrusive<Nccl>(std::move(gloo), std::move(options)); }))
      .def("_set_default_timeout", &Nccl::setTimeout)
      .def("abort", &Nccl::abort)
      .def("shutdown", &Nccl::shutdown);
  m.def("device_count", &visible);
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int d) { set_current(static_cast<DeviceIndex>(d)); });
  m.def("current_stream", [](int d) { return current_streams[d]; });
  m.def("set_stream", [](int d, int64_t id) { current_streams[d] = id; });
  m.def("synchronize", [](int d) { synchronize_device(static_cast<DeviceIndex>(d)); });
  m.def("default_generator", [](int d) { return default_generator(static_cast<DeviceIndex>(d)); });
  m.def("count", [](bool on) { counting = on; });
  m.def("take_counts", [] {
    std::lock_guard<std::mutex> guard(counts_mutex);
    return std::exchange(counts, {});
  });
  m.def("take_moved_bytes", [] { return moved_bytes.exchange(0); });
  m.def("watch", [](std::vector<std::string> kinds, const py::object& f) {
    std::lock_guard<std::mutex> guard(counts_mutex);
    watched = std::unordered_set<std::string>(kinds.begin(), kinds.end());
    watcher = f.is_none() ? nullptr : py::object(f).release().ptr();
  });
  m.def("take_races", [] {
    std::lock_guard<std::mutex> guard(order_mutex);
    freed.clear();
    return std::exchange(races, {});
  });
  m.def("set_unchecked", [](std::vector<std::string> names) { unchecked = std::unordered_set<std::string>(names.begin(), names.end()); });
  m.def("set_contracts", [](std::vector<std::string> names, const py::object& f) {
    contracted = std::unordered_set<std::string>(names.begin(), names.end());
    check_contract = py::object(f).release().ptr();
  });
  m.def("resize_storage", &resize_storage);
  m.def("memory", [] { return std::make_pair(live_bytes.load(), peak_bytes.load()); });
  m.def("reset_peak", [] { peak_bytes = live_bytes.load(); });
  m.def("capturing", [] { return capturing_now(); });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("begin", [](std::shared_ptr<Graph> g) {
        TORCH_CHECK(!capturing, "CUDA error: a graph is being captured already");
        g->clear();
        g->origin = current_stream(current_device);
        g->streams = {g->origin};
        capturing = std::move(g);
      })
      .def("end", [](const std::shared_ptr<Graph>& g) {  // nothing that was captured has run: there is nothing to wait for
        capturing.reset();
        std::lock_guard<std::mutex> guard(order_mutex);
        bool joined = std::all_of(g->streams.begin(), g->streams.end(), [&](StreamKey s) { return knows(g->origin, s, streams[s].now); });
        for (auto& [stream, state] : streams) join(host, {{stream, state.now}});
        TORCH_CHECK(joined, "CUDA error: capturing stream has unjoined work");
      })
      .def("replay", [](const std::shared_ptr<Graph>& g) { for (auto& node : g->nodes) node(); }, py::call_guard<py::gil_scoped_release>())
      .def("reset", [](const std::shared_ptr<Graph>& g) { g->clear(); });
}
