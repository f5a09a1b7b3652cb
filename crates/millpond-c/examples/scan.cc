// Counts the lines of a file: a queue keeps many reads in flight, without a thread for each.
//
//     c++ -std=c++17 scan.cc -o scan $(pkg-config --cflags --libs millpond)
//     ./scan FILE
#include <millpond.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace {

template <class Result> Result check(Result result) {
    if (result < 0) {
        char why[256];
        millpond_error_text(why, sizeof why);
        throw std::system_error(static_cast<int>(-result), std::generic_category(), why);
    }
    return result;
}

// Handles with destructors.
struct Engine {
    millpond_engine handle{};
    Engine() { check(millpond_engine_create(nullptr, &handle)); }
    Engine(const Engine &) = delete;
    ~Engine() { millpond_engine_destroy(handle); }
};
struct File {
    millpond_file handle{};
    File(const Engine &engine, const char *path) {
        check(millpond_open(engine.handle, path, nullptr, &handle));
    }
    File(const File &) = delete;
    ~File() { millpond_close(handle); }
};
struct Queue {
    millpond_queue handle{};
    Queue(const Engine &engine, size_t capacity) {
        check(millpond_queue_create(engine.handle, capacity, &handle));
    }
    Queue(const Queue &) = delete;
    // Waits for the requests in flight: the memory that they use must outlive them.
    ~Queue() { millpond_queue_destroy(handle); }
};

constexpr size_t block_bytes = 65536, depth = 16;

long long lines(const char *path) {
    const Engine engine;
    const File file(engine, path);
    std::vector<std::vector<char>> blocks(depth, std::vector<char>(block_bytes));
    const Queue queue(engine, depth); // declared after the blocks, so destroyed before them
    const auto end = static_cast<uint64_t>(check(millpond_len(file.handle)));
    uint64_t next = 0;
    long long found = 0;
    size_t under_way = 0;
    const auto read_into = [&](size_t block) {
        if (next >= end)
            return;
        millpond_request request{};
        request.op = MILLPOND_OP_READ;
        request.file = file.handle;
        request.user_data = block;
        request.memory = blocks[block].data();
        request.len = block_bytes;
        request.offset = next;
        check(millpond_queue_submit(queue.handle, &request, 1));
        next += block_bytes;
        under_way++;
    };
    for (size_t block = 0; block < depth; block++)
        read_into(block);
    while (under_way > 0) {
        millpond_completion done[depth];
        const auto count = check(millpond_queue_wait(queue.handle, done, 1, depth, -1));
        for (int64_t i = 0; i < count; i++) {
            const auto block = static_cast<size_t>(done[i].user_data);
            const auto bytes = check(done[i].result);
            found += std::count(blocks[block].begin(), blocks[block].begin() + bytes, '\n');
            under_way--;
            read_into(block);
        }
    }
    return found;
}

} // namespace

int main(int count, char **words) {
    try {
        if (count != 2)
            throw std::invalid_argument("usage: scan FILE");
        std::printf("%lld\n", lines(words[1]));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "scan: %s\n", error.what());
        return 1;
    }
}
