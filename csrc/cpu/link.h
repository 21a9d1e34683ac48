// A TCP connection to a rank on another host, and the frames that travel on it.
//
// Frames and reuse. A rank sends the same number of frames per call in both directions of a link,
// each with the number of its call and of its round, and a connection delivers in order. A frame is
// copied out of the kernel only into the buffer of its own round: Link reads a header, and no
// payload before the receiver has opened that round (`open`). So a fast peer's later bytes wait in
// the kernel's buffer, and a slow peer takes them for nothing but what their header says. A peer can
// be one call ahead at most, since a call ends when data of all ranks has arrived. Frames of an
// earlier call, which a rank left because ranks disagreed, are dropped by their number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace flux::host {

enum class FrameKind : std::uint32_t {
  kData = 0,
  kRefusal = 1,  // the payload says why this rank does not make the call
  kFailed = 2,   // the sender has given up on rank `culprit`
  kClosed = 3,
};

struct FrameHeader {
  std::uint32_t magic;
  FrameKind kind;
  std::uint32_t digest;  // of the call's arguments
  std::uint32_t round;   // kFailed: the culprit
  std::uint64_t call;
  std::uint64_t bytes;  // of payload
};
static_assert(sizeof(FrameHeader) == 32, "both ends read it as it lies in memory");

// What a link has to report; anything but kOpen ends a wait for its peer.
enum class LinkState { kOpen, kDisagrees, kRefused, kFailed, kClosed, kBroken };

class Link {
 public:
  // Takes over a connected, non-blocking socket.
  Link(int descriptor, int peer);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const { return peer_; }
  int descriptor() const { return descriptor_; }
  LinkState state() const { return state_; }
  int culprit() const { return culprit_; }
  const std::string& text() const { return text_; }  // why it broke, or what the peer refused
  std::uint64_t bytes_sent() const { return bytes_sent_; }

  // Begins a call: headers of frames must have this number and this digest.
  void begin(std::uint64_t call, std::uint32_t digest);

  // Appends the frame of the next round; `payload` must stay as it is until `sent` says so.
  void post(const char* payload, std::size_t bytes);
  // Number of rounds of this call that were posted, and that are with the kernel.
  std::uint32_t posted() const { return posted_; }
  std::uint32_t sent() const { return ended_ ? posted_ : sent_; }

  // Lets the frame of the next round arrive in `target`.
  void open(char* target, std::size_t bytes);
  // Number of rounds of this call that were opened, and that have arrived.
  std::uint32_t opened() const { return opened_; }
  std::uint32_t arrived() const { return arrived_; }
  std::size_t awaited() const;  // bytes of rounds that were opened

  // Sends and receives what is possible without waiting; returns whether anything moved.
  bool progress();
  // Whether there is something to read or to write for: the events for poll(2).
  short events() const;

  // Leaves the call: takes over what is being sent, and drops what is being received.
  void abandon();
  // Sends a frame without rounds as far as possible until the deadline (steady clock, ns).
  void tell(FrameKind kind, std::uint32_t culprit, const std::string& text, std::int64_t until_ns);
  // Ends the connection. Data with the kernel is still delivered.
  void close();

 private:
  struct Outgoing {
    FrameHeader header;
    const char* payload;
    std::vector<char> own;  // the payload, once the call that posted it has been left
    std::size_t done;       // of header and payload
  };
  struct Target {
    char* at;
    std::size_t bytes;
  };
  bool push();
  bool pull();
  bool parse();
  bool take_header();
  void broke(const std::string& why);
  std::size_t buffered() const { return end_ - begin_; }

  int descriptor_;
  const int peer_;
  LinkState state_ = LinkState::kOpen;
  int culprit_ = -1;
  std::string text_;
  std::uint64_t bytes_sent_ = 0;
  std::uint64_t call_ = 0;
  std::uint32_t digest_ = 0;
  std::deque<Outgoing> queue_;

  std::vector<char> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  bool in_payload_ = false;  // header_ has been read, its payload has not
  bool held_ = false;        // header_ is of a round or a call that has not begun here
  FrameHeader header_{};
  bool wanted_ = false;     // the payload is of the round that is open; else it is dropped
  bool ended_ = false;      // nothing more can be read
  char* target_ = nullptr;  // where the next bytes of a wanted payload go
  std::size_t left_ = 0;    // of the payload
  std::deque<Target> targets_;
  std::uint32_t posted_ = 0;
  std::uint32_t sent_ = 0;
  std::uint32_t opened_ = 0;
  std::uint32_t arrived_ = 0;
};

}  // namespace flux::host
