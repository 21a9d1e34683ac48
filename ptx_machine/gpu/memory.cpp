// Virtual memory management of the emulated driver: physical memory, addresses, and mappings of the one at
// the other; multicast objects. Physical memory is a file without a name, so that other processes can map it. The
// devices of a process have all their memory in one address space: access that one device has, all have.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "device.h"

namespace emulated {
namespace {

constexpr std::size_t kGranularity = 2 << 20;
constexpr int kDevices = 8;

// Values of CUresult.
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidHandle = 400;
constexpr int kNotPermitted = 800;

// Values of enumerations of cuda.h.
constexpr int kPinned = 1;      // CUmemAllocationType
constexpr int kOfDevice = 1;    // CUmemLocationType
constexpr int kDescriptor = 1;  // CUmemAllocationHandleType
constexpr int kNoAccess = 0, kReadWrite = 3;

struct Location {
  int type, id;
};
struct AllocationProp {
  int type, handle_types;
  Location location;
  void* windows;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct AccessDesc {
  Location location;
  int flags;
};
struct MulticastProp {
  unsigned devices;
  std::size_t bytes;
  unsigned long long handle_types, flags;
};

// Physical memory, or a multicast object. It lives as long as its handles and mappings.
struct Physical {
  struct Bound {
    std::size_t offset, bytes;  // in the multicast object
    std::shared_ptr<Physical> memory;
    std::size_t at;  // in the memory
  };
  AllocationProp prop{};
  std::size_t bytes = 0;
  int file = -1;
  int handles = 1;
  std::uintptr_t mapped_at = 0;  // where kernels access it first; 0: nowhere
  // Of a multicast object.
  unsigned team = 0;  // devices that it is for; 0: physical memory
  std::set<int> devices;
  std::vector<Bound> bound;

  ~Physical() {
    if (file >= 0) close(file);
  }
};
using Shared = std::shared_ptr<Physical>;

struct Mapping {
  std::size_t bytes;
  Shared memory;
  bool accessible = false;
};

std::mutex changing;  // guards what follows
std::map<std::uint64_t, Shared>& handles() {
  static auto* const all = new std::map<std::uint64_t, Shared>;
  return *all;
}
std::map<std::uintptr_t, std::size_t>& reserved() {  // addresses
  static auto* const all = new std::map<std::uintptr_t, std::size_t>;
  return *all;
}
std::map<std::uintptr_t, Mapping>& mappings() {
  static auto* const all = new std::map<std::uintptr_t, Mapping>;
  return *all;
}
std::uint64_t last_handle = 0;

// The machine that runs kernels, when there is one.
struct Kernels {
  void (*add)(void* memory, std::size_t bytes, const char* name) = nullptr;
  void (*remove)(void* memory) = nullptr;
  void (*add_multicast)(void* memory, std::size_t bytes, const std::uint64_t* members,
                        int count) = nullptr;
} kernels;

Shared find(std::uint64_t handle) {
  const auto found = handles().find(handle);
  return found == handles().end() ? nullptr : found->second;
}

std::uint64_t handle_of(Shared memory) {
  handles()[++last_handle] = std::move(memory);
  return last_handle;
}

bool whole(std::size_t bytes) { return bytes > 0 && bytes % kGranularity == 0; }

bool is_device(const Location& location) {
  return location.type == kOfDevice && location.id >= 0 && location.id < kDevices;
}

// Reserves addresses that are aligned; null: there are none.
void* reserve(std::size_t bytes, std::size_t alignment) {
  const std::size_t wide = bytes + alignment;
  void* const base = mmap(nullptr, wide, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  const std::uintptr_t at = (begin + alignment - 1) / alignment * alignment;
  if (at > begin) munmap(base, at - begin);
  munmap(reinterpret_cast<void*>(at + bytes), begin + wide - at - bytes);
  return reinterpret_cast<void*>(at);
}

// The mappings that make up a range; none: it begins or ends within one, or there is a gap.
std::vector<std::uintptr_t> mappings_of(std::uintptr_t begin, std::size_t bytes) {
  std::vector<std::uintptr_t> found;
  std::uintptr_t at = begin;
  while (at < begin + bytes) {
    const auto next = mappings().find(at);
    if (next == mappings().end()) return {};
    found.push_back(at);
    at += next->second.bytes;
  }
  return at == begin + bytes ? found : std::vector<std::uintptr_t>{};
}

// The mapping that an address lies in; null: nothing is mapped there.
const Mapping* mapping_at(std::uintptr_t address) {
  auto next = mappings().upper_bound(address);
  if (next == mappings().begin()) return nullptr;
  const auto& [begin, mapping] = *--next;
  return address < begin + mapping.bytes ? &mapping : nullptr;
}

void take_access(std::uintptr_t at, Mapping& mapping) {
  if (!std::exchange(mapping.accessible, false)) return;
  mprotect(reinterpret_cast<void*>(at), mapping.bytes, PROT_NONE);
  if (kernels.remove != nullptr) kernels.remove(reinterpret_cast<void*>(at));
  if (mapping.memory->mapped_at != at) return;
  mapping.memory->mapped_at = 0;
  for (const auto& [other, one] : mappings()) {
    if (one.accessible && one.memory == mapping.memory) mapping.memory->mapped_at = other;
  }
}

bool is_mapped(std::uintptr_t begin, std::uintptr_t end) {
  while (begin < end) {
    auto next = mappings().upper_bound(begin);
    if (next == mappings().begin()) return false;
    const auto& [at, mapping] = *--next;
    if (at + mapping.bytes <= begin || !mapping.accessible) return false;
    begin = at + mapping.bytes;
  }
  return true;
}

// Addresses of what a multicast object stands for, of each device; empty: some of it is not mapped.
std::vector<std::uint64_t> members_of(const Physical& object, std::size_t bytes) {
  std::vector<std::uint64_t> members;
  for (const Physical::Bound& one : object.bound) {
    if (one.offset != 0 || one.bytes < bytes || one.memory->mapped_at == 0) return {};
    members.push_back(one.memory->mapped_at + one.at);
  }
  return members.size() == object.team ? members : std::vector<std::uint64_t>{};
}

int give_access(std::uintptr_t at, Mapping& mapping) {
  if (mapping.accessible) return 0;
  void* const place = reinterpret_cast<void*>(at);
  if (mapping.memory->team > 0) {
    const auto members = members_of(*mapping.memory, mapping.bytes);
    if (members.empty()) return kNotSupported;
    if (kernels.add_multicast != nullptr) {
      kernels.add_multicast(place, mapping.bytes, members.data(), static_cast<int>(members.size()));
    }
  } else {
    if (mprotect(place, mapping.bytes, PROT_READ | PROT_WRITE) != 0) return kOutOfMemory;
    if (kernels.add != nullptr) kernels.add(place, mapping.bytes, "mapped memory");
    if (mapping.memory->mapped_at == 0) mapping.memory->mapped_at = at;
  }
  mapping.accessible = true;
  return 0;
}

}  // namespace

bool is_unmapped(std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard<std::mutex> hold(changing);
  auto range = reserved().upper_bound(address);
  if (range == reserved().begin()) return false;
  --range;
  const std::uintptr_t end = std::min(address + bytes, range->first + range->second);
  return address < end && !is_mapped(address, end);
}

}  // namespace emulated

extern "C" {

using namespace emulated;

// Tells a machine from now on which memory kernels may access.
void emulator_attach_memory(decltype(Kernels::add) add, decltype(Kernels::remove) remove,
                            decltype(Kernels::add_multicast) add_multicast) {
  const std::lock_guard<std::mutex> hold(changing);
  kernels = {add, remove, add_multicast};
}
// How many handles, reservations and mappings there are.
int emulator_memory_objects() {
  const std::lock_guard<std::mutex> hold(changing);
  return static_cast<int>(handles().size() + reserved().size() + mappings().size());
}

// -- physical memory -------------------------------------------------------------------------------

int cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp* prop, int) {
  *bytes = kGranularity;
  return is_device(prop->location) ? 0 : kInvalidDevice;
}

int cuMemCreate(std::uint64_t* handle, std::size_t bytes, const AllocationProp* prop,
                unsigned long long flags) {
  if (!is_device(prop->location)) return kInvalidDevice;
  if (prop->type != kPinned || flags != 0 || !whole(bytes)) return kRefused;
  if ((prop->handle_types & ~kDescriptor) != 0) return kNotSupported;
  auto made = std::make_shared<Physical>();
  made->prop = *prop;
  made->bytes = bytes;
  made->file = memfd_create("ptx-machine-memory", MFD_CLOEXEC);
  if (made->file < 0 || ftruncate(made->file, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  const std::lock_guard<std::mutex> hold(changing);
  *handle = handle_of(std::move(made));
  return 0;
}

int cuMemRelease(std::uint64_t handle) {
  const std::lock_guard<std::mutex> hold(changing);
  const Shared memory = find(handle);
  if (memory == nullptr) return kInvalidHandle;
  if (--memory->handles == 0) handles().erase(handle);
  return 0;
}

int cuMemRetainAllocationHandle(std::uint64_t* handle, void* address) {
  const std::lock_guard<std::mutex> hold(changing);
  const Mapping* mapping = mapping_at(reinterpret_cast<std::uintptr_t>(address));
  if (mapping == nullptr) return kRefused;
  for (const auto& [number, memory] : handles()) {
    if (memory != mapping->memory) continue;
    ++memory->handles;
    *handle = number;
    return 0;
  }
  mapping->memory->handles = 1;  // it had been released
  *handle = handle_of(mapping->memory);
  return 0;
}

int cuMemGetAllocationPropertiesFromHandle(AllocationProp* prop, std::uint64_t handle) {
  const std::lock_guard<std::mutex> hold(changing);
  const Shared memory = find(handle);
  if (memory == nullptr || memory->team > 0) return kInvalidHandle;
  *prop = memory->prop;
  return 0;
}

int cuMemExportToShareableHandle(void* descriptor, std::uint64_t handle, int type,
                                 unsigned long long flags) {
  const std::lock_guard<std::mutex> hold(changing);
  const Shared memory = find(handle);
  if (memory == nullptr) return kInvalidHandle;
  if (type != kDescriptor || flags != 0) return kRefused;
  if ((memory->prop.handle_types & kDescriptor) == 0) return kNotPermitted;
  const int file = dup(memory->file);
  if (file < 0) return kOutOfMemory;
  std::memcpy(descriptor, &file, sizeof(file));
  return 0;
}

int cuMemImportFromShareableHandle(std::uint64_t* handle, void* descriptor, int type) {
  if (type != kDescriptor) return kRefused;
  auto made = std::make_shared<Physical>();
  made->file = dup(static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor)));
  struct stat known{};
  if (made->file < 0 || fstat(made->file, &known) != 0) return kRefused;
  made->bytes = static_cast<std::size_t>(known.st_size);
  if (!whole(made->bytes)) return kRefused;
  made->prop.type = kPinned;
  made->prop.handle_types = kDescriptor;
  made->prop.location = {kOfDevice, 0};
  const std::lock_guard<std::mutex> hold(changing);
  *handle = handle_of(std::move(made));
  return 0;
}

// -- addresses -------------------------------------------------------------------------------------

int cuMemAddressReserve(std::uintptr_t* address, std::size_t bytes, std::size_t alignment,
                        std::uintptr_t, unsigned long long flags) {
  const bool power = (alignment & (alignment - 1)) == 0;
  if (!whole(bytes) || !power || flags != 0) return kRefused;
  void* const place = reserve(bytes, std::max(alignment, kGranularity));
  if (place == nullptr) return kOutOfMemory;
  *address = reinterpret_cast<std::uintptr_t>(place);
  const std::lock_guard<std::mutex> hold(changing);
  reserved()[*address] = bytes;
  return 0;
}

int cuMemAddressFree(std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard<std::mutex> hold(changing);
  const auto found = reserved().find(address);
  if (found == reserved().end() || found->second != bytes) return kRefused;
  const auto mapped = mappings().lower_bound(address);
  if (mapped != mappings().end() && mapped->first < address + bytes) return kRefused;
  munmap(reinterpret_cast<void*>(address), bytes);
  reserved().erase(found);
  return 0;
}

int cuMemMap(std::uintptr_t address, std::size_t bytes, std::size_t offset, std::uint64_t handle,
             unsigned long long flags) {
  const std::lock_guard<std::mutex> hold(changing);
  const Shared memory = find(handle);
  if (memory == nullptr) return kInvalidHandle;
  const bool fits = whole(bytes) && bytes <= memory->bytes && address % kGranularity == 0;
  if (!fits || offset != 0 || flags != 0) return kRefused;
  auto range = reserved().upper_bound(address);
  if (range == reserved().begin()) return kRefused;
  --range;
  if (address + bytes > range->first + range->second) return kRefused;
  auto next = mappings().lower_bound(address);
  if (next != mappings().end() && next->first < address + bytes) return kRefused;
  if (mapping_at(address) != nullptr) return kRefused;
  void* const place = reinterpret_cast<void*>(address);
  if (memory->team == 0 &&
      mmap(place, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file, 0) == MAP_FAILED) {
    return kOutOfMemory;
  }
  mappings()[address] = {bytes, memory};
  return 0;
}

int cuMemUnmap(std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard<std::mutex> hold(changing);
  const auto all = mappings_of(address, bytes);
  if (all.empty()) return kRefused;
  for (const std::uintptr_t at : all) {
    Mapping& mapping = mappings().at(at);
    take_access(at, mapping);
    mmap(reinterpret_cast<void*>(at), mapping.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    mappings().erase(at);
  }
  return 0;
}

int cuMemSetAccess(std::uintptr_t address, std::size_t bytes, const AccessDesc* all,
                   std::size_t count) {
  const std::lock_guard<std::mutex> hold(changing);
  const auto places = mappings_of(address, bytes);
  if (places.empty() || count == 0) return kRefused;
  bool any = false;
  for (std::size_t i = 0; i < count; ++i) {
    if (!is_device(all[i].location)) return kInvalidDevice;
    if (all[i].flags != kNoAccess && all[i].flags != kReadWrite) return kNotSupported;
    any |= all[i].flags == kReadWrite;
  }
  for (const std::uintptr_t at : places) {
    Mapping& mapping = mappings().at(at);
    if (!any) take_access(at, mapping);
    if (const int refused = any ? give_access(at, mapping) : 0; refused != 0) return refused;
  }
  return 0;
}

int cuMemGetAccess(unsigned long long* flags, const Location* location, std::uintptr_t address) {
  const std::lock_guard<std::mutex> hold(changing);
  if (!is_device(*location)) return kInvalidDevice;
  const Mapping* mapping = mapping_at(address);
  if (mapping == nullptr) return kRefused;
  *flags = mapping->accessible ? kReadWrite : kNoAccess;
  return 0;
}

// -- multicast objects -----------------------------------------------------------------------------

int cuMulticastGetGranularity(std::size_t* bytes, const MulticastProp*, int) {
  *bytes = kGranularity;
  return 0;
}

int cuMulticastCreate(std::uint64_t* handle, const MulticastProp* prop) {
  if (prop->devices == 0 || prop->devices > kDevices || !whole(prop->bytes)) return kRefused;
  if (prop->flags != 0) return kRefused;
  if (prop->handle_types != 0) return kNotSupported;
  auto made = std::make_shared<Physical>();
  made->bytes = prop->bytes;
  made->team = prop->devices;
  const std::lock_guard<std::mutex> hold(changing);
  *handle = handle_of(std::move(made));
  return 0;
}

int cuMulticastAddDevice(std::uint64_t handle, int device) {
  const std::lock_guard<std::mutex> hold(changing);
  const Shared object = find(handle);
  if (object == nullptr || object->team == 0) return kInvalidHandle;
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  if (object->devices.size() == object->team) return kRefused;
  return object->devices.insert(device).second ? 0 : kRefused;
}

int cuMulticastBindMem(std::uint64_t handle, std::size_t offset, std::uint64_t memory_handle,
                       std::size_t at, std::size_t bytes, unsigned long long flags) {
  const std::lock_guard<std::mutex> hold(changing);
  const Shared object = find(handle), memory = find(memory_handle);
  if (object == nullptr || object->team == 0) return kInvalidHandle;
  if (memory == nullptr || memory->team > 0) return kInvalidHandle;
  const bool fits = whole(bytes) && offset % kGranularity == 0 && at % kGranularity == 0 &&
                    offset + bytes <= object->bytes && at + bytes <= memory->bytes;
  const int device = memory->prop.location.id;
  const bool known = object->devices.size() == object->team && object->devices.count(device) == 1;
  if (!fits || !known || flags != 0) return kRefused;
  for (const Physical::Bound& one : object->bound) {
    const bool apart = offset + bytes <= one.offset || one.offset + one.bytes <= offset;
    if (one.memory->prop.location.id == device && !apart) return kRefused;
  }
  object->bound.push_back({offset, bytes, memory, at});
  return 0;
}

int cuMulticastUnbind(std::uint64_t handle, int device, std::size_t offset, std::size_t bytes) {
  const std::lock_guard<std::mutex> hold(changing);
  const Shared object = find(handle);
  if (object == nullptr || object->team == 0) return kInvalidHandle;
  const auto bound =
      std::find_if(object->bound.begin(), object->bound.end(), [&](const Physical::Bound& one) {
        return one.memory->prop.location.id == device && one.offset == offset && one.bytes == bytes;
      });
  if (bound == object->bound.end()) return kRefused;
  object->bound.erase(bound);
  return 0;
}

}  // extern "C"
