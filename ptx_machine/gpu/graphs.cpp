// Capture of streams, and graphs: see device.h. A capture is ended well only if all streams that joined it
// have been joined back, and if nothing waited for one of them meanwhile.
#include <algorithm>

#include "device.h"

namespace emulated {

namespace {

// Values of CUresult.
constexpr int kInvalidated = 901;
constexpr int kUnmatched = 903;  // not the stream on which the capture began, or none
constexpr int kUnjoined = 904;
constexpr int kIsolation = 905;

std::uint64_t captures = 0;     // so far
std::vector<Graph*> under_way;  // captures; of one thread at a time, as all that the host submits

Graph* with_id(std::uint64_t id) {
  const auto found = std::find_if(under_way.begin(), under_way.end(),
                                  [id](const Graph* graph) { return graph->id == id; });
  return found == under_way.end() ? nullptr : *found;
}

}  // namespace

int Graph::index(Stream* stream) {
  for (std::size_t i = 0; i < streams.size(); ++i) {
    if (streams[i] == stream) return static_cast<int>(i);
  }
  streams.push_back(stream);
  stream->capture = this;
  return static_cast<int>(streams.size()) - 1;
}

void Graph::add(Stream* stream, Item item, int records, int awaits) {
  const int at = index(stream);
  nodes.push_back({at, std::move(item), records, awaits});
}

void Graph::end() {
  for (Stream* stream : streams) {
    if (stream != nullptr) stream->capture = nullptr;
  }
}

std::vector<std::set<int>> Graph::edges() const {
  const int count = static_cast<int>(nodes.size());
  std::vector<std::set<int>> before(count);
  for (int i = 0; i < count; ++i) {
    for (int j = i - 1; j >= 0; --j) {
      if (nodes[j].stream == nodes[i].stream) {
        before[i].insert(j);
        break;
      }
    }
    for (int j = 0; j < i && nodes[i].awaits >= 0; ++j) {
      if (nodes[j].records == nodes[i].awaits) before[i].insert(j);
    }
  }
  return before;
}

bool Graph::joined() const {
  const auto before = edges();
  std::vector<bool> awaited(nodes.size(), false);
  bool last = true;  // of the first stream, from the end
  bool all = true;
  for (int i = static_cast<int>(nodes.size()) - 1; i >= 0; --i) {
    if (nodes[i].stream == 0 && std::exchange(last, false)) awaited[i] = true;
    if (awaited[i]) {
      for (const int j : before[i]) awaited[j] = true;
    }
    const bool works = nodes[i].records < 0 && nodes[i].awaits < 0;
    all &= awaited[i] || !works || nodes[i].stream == 0;
  }
  return all;
}

bool forbidden_in_capture(Stream* stream) {
  if (stream->capture == nullptr) return false;
  stream->capture->invalid = true;
  return true;
}

void leave_capture(Stream* stream) {
  if (!forbidden_in_capture(stream)) return;
  for (Stream*& one : stream->capture->streams) {
    if (one == stream) one = nullptr;
  }
}

bool captured_record(Event* event, Stream* stream) {
  Graph* graph = stream->capture;
  event->capture = graph == nullptr ? 0 : graph->id;
  if (graph == nullptr) return false;
  event->number = graph->events++;
  graph->add(stream, item("event_record", {}), event->number, -1);
  return true;
}

int captured_wait(const Event* event, Stream* stream, bool* captured) {
  Graph* graph = stream->capture;
  *captured = graph != nullptr || event->capture != 0;
  if (!*captured) return 0;
  Graph* const of_event = event->capture == 0 ? nullptr : with_id(event->capture);
  if (of_event == nullptr || (graph != nullptr && graph != of_event)) {
    if (graph != nullptr) graph->invalid = true;
    return kIsolation;
  }
  of_event->add(stream, item("event_wait", {}), -1, event->number);
  return 0;
}

// -- launches --------------------------------------------------------------------------------------

GraphExec::GraphExec(const Graph& graph)
    : nodes_(graph.nodes), edges_(graph.edges()), events_(graph.events) {
  int streams = 1;
  for (const Graph::Node& node : nodes_) streams = std::max(streams, node.stream + 1);
  for (int i = 1; i < streams; ++i) own_.push_back(std::make_unique<Stream>(false));
}

void GraphExec::launch(Stream* on) {
  on->put(item("graph_begin", [before = last_] { await(before); }));
  last_ = std::make_shared<Signal>();
  Item end = item("graph_end", [ended = last_] { raise(ended); });
  if (device().kernels_first) {
    launch_in_turn(on);
    return on->put(std::move(end), true);
  }
  std::vector<Flag> done;
  for (int i = 0; i < events_; ++i) done.push_back(std::make_shared<Signal>());
  for (const Graph::Node& node : nodes_) {
    Stream* stream = node.stream == 0 ? on : own_[node.stream - 1].get();
    Item next = node.item;
    if (node.records >= 0) {
      next.run = [flag = done[node.records]] { raise(flag); };
    } else if (node.awaits >= 0) {
      next.run = [flag = done[node.awaits]] { await(flag); };
    }
    stream->put(std::move(next), true);
  }
  on->put(std::move(end), true);
}

// Of what the edges allow next: a kernel; else what a kernel comes behind; else what is no copy.
void GraphExec::launch_in_turn(Stream* on) {
  const int count = static_cast<int>(nodes_.size());
  std::vector<bool> leads(count, false);
  for (int i = count - 1; i >= 0; --i) {
    if (nodes_[i].item.kind != Item::kKernel && !leads[i]) continue;
    for (const int j : edges_[i]) leads[j] = true;
  }
  const auto rank = [&](int i) {
    if (nodes_[i].item.kind == Item::kKernel) return 0;
    return leads[i] ? 1 : nodes_[i].item.kind == Item::kCopy ? 3 : 2;
  };
  std::vector<bool> done(count, false);
  for (int turn = 0; turn < count; ++turn) {
    int best = -1;
    for (int i = 0; i < count; ++i) {
      const bool ready =
          std::all_of(edges_[i].begin(), edges_[i].end(), [&](int j) { return done[j]; });
      if (!done[i] && ready && (best < 0 || rank(i) < rank(best))) best = i;
    }
    done[best] = true;
    const Graph::Node& node = nodes_[best];
    if (node.records < 0 && node.awaits < 0) on->put(node.item, true);
  }
}

}  // namespace emulated

// -- the driver ------------------------------------------------------------------------------------

extern "C" {

using namespace emulated;

int cuStreamBeginCapture_v2(void* handle, int mode) {
  Stream* const stream = stream_of(handle);
  if (mode < 0 || mode > 2) return kRefused;
  if (stream->capture != nullptr) return kRefused;
  under_way.push_back(new Graph{++captures, {}, {}, 0});
  under_way.back()->index(stream);
  device().log_call("begin_capture", stream->handle(), "");
  return 0;
}

int cuStreamEndCapture(void* handle, void** made) {
  Stream* const stream = stream_of(handle);
  *made = nullptr;
  Graph* const graph = stream->capture;
  if (graph == nullptr) return kUnmatched;
  if (graph->streams[0] != stream) {
    graph->invalid = true;
    return kUnmatched;
  }
  graph->end();
  under_way.erase(std::find(under_way.begin(), under_way.end(), graph));
  device().log_call("end_capture", stream->handle(), "");
  if (!graph->invalid && graph->joined()) {
    graph->streams.clear();
    *made = graph;
    return 0;
  }
  const int refused = graph->invalid ? kInvalidated : kUnjoined;
  delete graph;
  return refused;
}

int cuStreamIsCapturing(void* handle, int* status) {
  const Graph* graph = stream_of(handle)->capture;
  *status = graph == nullptr ? 0 : graph->invalid ? 2 : 1;
  return 0;
}

int cuStreamGetCaptureInfo_v2(void* handle, int* status, std::uint64_t* id, void**, const void**,
                              std::size_t*) {
  const Graph* graph = stream_of(handle)->capture;
  cuStreamIsCapturing(handle, status);
  if (graph != nullptr && id != nullptr) *id = graph->id;
  return 0;
}

int cuGraphInstantiateWithFlags(void** exec, void* graph, std::uint64_t) {
  *exec = new GraphExec(*static_cast<Graph*>(graph));
  return 0;
}

int cuGraphLaunch(void* exec, void* handle) {
  Stream* const stream = stream_of(handle);
  if (stream->capture != nullptr) return kNotSupported;  // a graph as a node of another
  device().log_call("replay", stream->handle(), "");
  static_cast<GraphExec*>(exec)->launch(stream);
  return 0;
}

int cuGraphExecDestroy(void* exec) {
  delete static_cast<GraphExec*>(exec);
  return 0;
}

int cuGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return 0;
}

}  // extern "C"
