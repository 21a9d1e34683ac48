#include "cpu/link.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace flux::host {
namespace {

constexpr std::uint32_t kMagic = 0x464c5831;  // changes with FrameHeader
constexpr std::size_t kBufferBytes = std::size_t{64} << 10;
constexpr std::size_t kMostText = 1024;

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

Link::Link(int descriptor, int peer)
    : descriptor_(descriptor), peer_(peer), buffer_(kBufferBytes) {}

Link::~Link() {
  if (descriptor_ >= 0)
    ::close(descriptor_);  // reads nothing: a forked child shares the connection
}

void Link::begin(std::uint64_t call, std::uint32_t digest) {
  call_ = call;
  digest_ = digest;
  targets_.clear();
  posted_ = sent_ = opened_ = arrived_ = 0;
  if (state_ == LinkState::kDisagrees || state_ == LinkState::kRefused) {
    state_ = LinkState::kOpen;  // of the call before
    text_.clear();
  }
  held_ = false;  // look at a held header again
}

void Link::post(const char* payload, std::size_t bytes) {
  queue_.push_back({{kMagic, FrameKind::kData, digest_, posted_++, call_, bytes}, payload, {}, 0});
}

void Link::open(char* target, std::size_t bytes) {
  targets_.push_back({target, bytes});
  ++opened_;
  held_ = false;
}

std::size_t Link::awaited() const {
  std::size_t bytes = in_payload_ && wanted_ ? left_ : 0;
  for (const Target& target : targets_) bytes += target.bytes;
  return bytes;
}

bool Link::progress() {
  if (descriptor_ < 0 || ended_) return false;
  const bool wrote = !queue_.empty() && push();
  const bool read = pull();
  return wrote || read;
}

short Link::events() const {
  if (descriptor_ < 0 || ended_) return 0;
  return static_cast<short>((queue_.empty() ? 0 : POLLOUT) | (held_ ? 0 : POLLIN));
}

void Link::broke(const std::string& why) {
  if (state_ != LinkState::kFailed && state_ != LinkState::kClosed) state_ = LinkState::kBroken;
  text_ = why;
  ended_ = true;
  queue_.clear();
}

bool Link::push() {
  bool any = false;
  while (!queue_.empty()) {
    Outgoing& out = queue_.front();
    const std::size_t header = sizeof(FrameHeader);
    iovec parts[2];
    int count = 0;
    if (out.done < header) {
      parts[count++] = {reinterpret_cast<char*>(&out.header) + out.done, header - out.done};
    }
    const std::size_t at = out.done > header ? out.done - header : 0;
    if (at < out.header.bytes) {
      parts[count++] = {const_cast<char*>(out.payload) + at,
                        static_cast<std::size_t>(out.header.bytes) - at};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
    const ssize_t sent = sendmsg(descriptor_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return any;
      const std::string why = std::strerror(errno);
      pull();  // the peer may have said why it left, before it did
      broke(why);
      return true;
    }
    any = true;
    out.done += static_cast<std::size_t>(sent);
    bytes_sent_ += static_cast<std::uint64_t>(sent);
    if (out.done < header + out.header.bytes) continue;
    if (out.header.kind == FrameKind::kData && out.header.call == call_) ++sent_;
    queue_.pop_front();
  }
  return any;
}

// Reads the next header once all of it is there; returns whether to go on.
bool Link::take_header() {
  if (!in_payload_) {
    if (buffered() < sizeof(FrameHeader)) return false;
    std::memcpy(&header_, buffer_.data() + begin_, sizeof(FrameHeader));
    if (header_.magic != kMagic ||
        (header_.kind != FrameKind::kData && header_.bytes > kMostText)) {
      broke("it sent what is no frame");
      return false;
    }
  }
  const bool ahead = header_.call > call_;
  const bool of_call = header_.kind == FrameKind::kData || header_.kind == FrameKind::kRefusal;
  if (of_call && ahead) {
    held_ = true;
    return false;
  }
  wanted_ = false;
  if (header_.kind == FrameKind::kData && header_.call == call_) {
    const bool fits = header_.digest == digest_ && state_ == LinkState::kOpen;
    if (fits && targets_.empty()) {
      held_ = true;
      return false;
    }
    if (fits && targets_.front().bytes == header_.bytes && header_.round == arrived_) {
      wanted_ = true;
      target_ = targets_.front().at;
      targets_.pop_front();
    } else if (state_ == LinkState::kOpen) {
      state_ = LinkState::kDisagrees;
    }
  }
  begin_ += sizeof(FrameHeader);
  left_ = static_cast<std::size_t>(header_.bytes);
  in_payload_ = true;
  if (header_.kind == FrameKind::kRefusal && header_.call == call_) {
    wanted_ = true;
    text_.clear();
  }
  return true;
}

// Takes what the buffer has; returns whether it took anything.
bool Link::parse() {
  bool any = false;
  for (;;) {
    if (!in_payload_) {
      if (!take_header()) return any;
      any = true;
    }
    const std::size_t part = std::min(left_, buffered());
    if (wanted_ && header_.kind == FrameKind::kRefusal) {
      text_.append(buffer_.data() + begin_, part);
    } else if (wanted_ && part > 0) {
      std::memcpy(target_, buffer_.data() + begin_, part);
      target_ += part;
    }
    begin_ += part;
    left_ -= part;
    if (left_ > 0) return any;
    in_payload_ = false;
    if (header_.kind == FrameKind::kRefusal) {
      if (wanted_) state_ = LinkState::kRefused;
    } else if (header_.kind == FrameKind::kFailed) {
      state_ = LinkState::kFailed;
      culprit_ = static_cast<int>(header_.round);
    } else if (header_.kind == FrameKind::kClosed) {
      if (state_ == LinkState::kOpen) state_ = LinkState::kClosed;
    } else if (wanted_) {
      ++arrived_;
    }
    any = true;
  }
}

bool Link::pull() {
  bool any = false;
  for (;;) {
    if (parse()) any = true;
    if (held_ || ended_) return any;
    // A large payload goes where it belongs, without a copy.
    char* into = nullptr;
    std::size_t room = 0;
    const bool direct =
        in_payload_ && wanted_ && header_.kind == FrameKind::kData && left_ >= kBufferBytes / 4;
    if (direct) {
      into = target_;
      room = left_;
    } else {
      if (begin_ == end_) begin_ = end_ = 0;
      if (end_ == buffer_.size()) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
        end_ -= begin_;
        begin_ = 0;
      }
      into = buffer_.data() + end_;
      room = buffer_.size() - end_;
    }
    const ssize_t got = recv(descriptor_, into, room, MSG_DONTWAIT);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return any;
      broke(std::strerror(errno));
      return true;
    }
    if (got == 0) {
      broke("it was closed by the peer's host");
      return true;
    }
    any = true;
    if (!direct) {
      end_ += static_cast<std::size_t>(got);
      // The kernel had no more: the next recv would only say so.
      if (static_cast<std::size_t>(got) < room) {
        parse();
        return true;
      }
    } else {
      target_ += got;
      left_ -= static_cast<std::size_t>(got);
      if (left_ > 0 && static_cast<std::size_t>(got) < room) return true;
    }
  }
}

void Link::abandon() {
  targets_.clear();
  wanted_ = false;
  while (queue_.size() > 1) queue_.pop_back();
  if (queue_.empty()) return;
  Outgoing& out = queue_.front();
  if (out.done == 0) {
    queue_.clear();
  } else if (out.own.empty() && out.header.bytes > 0) {
    out.own.assign(out.payload, out.payload + out.header.bytes);
    out.payload = out.own.data();
  }
}

void Link::tell(FrameKind kind, std::uint32_t culprit, const std::string& text,
                std::int64_t until_ns) {
  if (descriptor_ < 0 || ended_) return;
  Outgoing out{{kMagic, kind, digest_, culprit, call_, std::min(text.size(), kMostText)},
               nullptr,
               std::vector<char>(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(std::min(
                                                                  text.size(), kMostText))),
               0};
  queue_.push_back(std::move(out));
  queue_.back().payload = queue_.back().own.data();
  push();
  while (!queue_.empty() && now_ns() < until_ns) {
    pollfd waiting{descriptor_, POLLOUT, 0};
    poll(&waiting, 1, 1);
    push();
  }
}

void Link::close() {
  if (descriptor_ < 0) return;
  // With unread data the kernel would reset the connection, and drop what is still to be sent.
  for (int i = 0; i < 256 && !ended_; ++i) {
    if (recv(descriptor_, buffer_.data(), buffer_.size(), MSG_DONTWAIT) <= 0) break;
  }
  ::close(descriptor_);
  descriptor_ = -1;
  queue_.clear();
}

}  // namespace flux::host
