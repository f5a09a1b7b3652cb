//! The catalog of the benchmark: the sections of a report, their questions, and the description of
//! each case.
//!
//! [`render_docs`](super::render_docs) and [`html`](super::html) print it beside the results;
//! [`targets`](super::targets) has the targets.

/// Suites that answer one question, and published results for it.
pub struct Section {
    pub title: &'static str,
    pub question: &'static str,
    pub suites: &'static [&'static str],
    pub published: &'static [Published],
    /// Results that depend on a parameter, drawn as lines.
    pub lines: &'static [Lines],
}

/// Published results of other machines: only their trend is comparable, not their values.
pub struct Published {
    pub title: &'static str,
    pub across: &'static str,
    pub up: &'static str,
    pub series: &'static [(&'static str, &'static [(f64, f64)])],
}

/// The rows that are points of lines, and the parameter on the x axis.
pub struct Lines {
    pub suite: &'static str,
    /// The cases, by a prefix of their names.
    pub cases: &'static str,
    pub across: Across,
    pub title: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Across {
    Depth,
    Threads,
    BlockBytes,
}

impl Across {
    pub fn name(self) -> &'static str {
        match self {
            Across::Depth => "in flight",
            Across::Threads => "threads",
            Across::BlockBytes => "bytes of a request",
        }
    }
}

/// Cases, by a prefix of their names, and their description.
pub struct Case {
    pub suite: &'static str,
    pub cases: &'static str,
    pub what: &'static str,
}

const fn case(suite: &'static str, cases: &'static str, what: &'static str) -> Case {
    Case { suite, cases, what }
}

const fn lines(
    suite: &'static str,
    cases: &'static str,
    across: Across,
    title: &'static str,
) -> Lines {
    Lines { suite, cases, across, title }
}

const fn section(
    title: &'static str,
    suites: &'static [&'static str],
    question: &'static str,
    published: &'static [Published],
    lines: &'static [Lines],
) -> Section {
    Section { title, question, suites, published, lines }
}

pub const SECTIONS: [Section; 10] = [
    section(
        "Cached reads",
        &["cached-read"],
        "How close to a bare memcpy can a read of a cached page be, and do threads that read one file \
         get in each other's way? FreeBSD's VMIO read took the vnode lock off this path.",
        &[Published {
            title: "will-it-scale on FreeBSD, 52 processes",
            across: "0: before, 1: VMIO read",
            up: "million reads/s",
            series: &[
                ("pread3, own offsets of one file", &[(0.0, 4.35), (1.0, 166.0)]),
                ("read2, all of one file", &[(0.0, 3.68), (1.0, 79.5)]),
            ],
        }],
        &[
            lines("cached-read", "random-4k", Across::Threads, "4 KiB at random of 256 MiB"),
            lines("cached-read", "pread3-4k", Across::Threads, "pread3: own offsets of one file"),
            lines("cached-read", "read2-4k", Across::Threads, "read2: all of one file"),
        ],
    ),
    section(
        "Asynchronous reads",
        &["async-read"],
        "What does a read that misses cost where no thread waits for it? Linux 5.9 made buffered reads \
         of io_uring asynchronous, where each had taken a worker thread.",
        &[Published {
            title: "Linux, 4 KiB at random, ext4",
            across: "in flight",
            up: "thousand reads/s",
            series: &[
                (
                    "asynchronous",
                    &[(1.0, 9.046), (2.0, 19.8), (4.0, 39.2), (8.0, 64.4), (16.0, 65.7)],
                ),
                (
                    "by threads",
                    &[(1.0, 8.294), (2.0, 18.9), (4.0, 28.5), (8.0, 31.4), (16.0, 37.8)],
                ),
            ],
        }],
        &[lines("async-read", "cold-random-4k", Across::Depth, "4 KiB at random, each a miss")],
    ),
    section(
        "Direct I/O without copies of vectors",
        &["no-copy"],
        "Does a request cost more the more segments it has? Linux 5.12 stopped copying the vector of a \
         direct request.",
        &[Published {
            title: "Linux, null block device, 128 in flight",
            across: "bytes of a request",
            up: "million requests/s",
            series: &[
                (
                    "borrowed",
                    &[
                        (512.0, 1.222),
                        (4096.0, 1.222),
                        (8192.0, 1.170),
                        (16384.0, 1.137),
                        (32768.0, 1.083),
                        (65536.0, 0.982),
                    ],
                ),
                (
                    "copied",
                    &[
                        (512.0, 1.208),
                        (4096.0, 1.208),
                        (8192.0, 1.131),
                        (16384.0, 1.039),
                        (32768.0, 0.863),
                        (65536.0, 0.699),
                    ],
                ),
            ],
        }],
        &[lines(
            "no-copy",
            "null-read-",
            Across::BlockBytes,
            "Reads of a device that completes at once",
        )],
    ),
    section(
        "Readers and writers of one file",
        &["mixed"],
        "Can reads be atomic beside writes and both be fast? ext4's reads are not atomic; XFS's are, by a \
         lock on the whole file.",
        &[Published {
            title: "8 KiB, 8 readers (0) and 8 writers (1), page cache cold, cloud disk",
            across: "0: reads, 1: writes",
            up: "MiB/s",
            series: &[
                ("ext4", &[(0.0, 826.0), (1.0, 309.0)]),
                ("XFS", &[(0.0, 7.0), (1.0, 155.0)]),
            ],
        }],
        &[],
    ),
    section(
        "Locks on ranges of bytes",
        &["range-lock"],
        "What holds the ranges is itself locked: how do range locks scale with threads?",
        &[Published {
            title: "XFS thread, 16 processors, 100 ranges held by each thread",
            across: "threads",
            up: "million pairs/s",
            series: &[
                (
                    "mutex B-tree",
                    &[(1.0, 5.239), (2.0, 1.014), (4.0, 0.986), (8.0, 0.733), (16.0, 0.653)],
                ),
                (
                    "OLC B-tree",
                    &[(1.0, 0.949), (2.0, 1.399), (4.0, 2.405), (8.0, 3.288), (16.0, 2.809)],
                ),
                (
                    "OLC, interleaved",
                    &[(1.0, 1.046), (2.0, 1.530), (4.0, 1.147), (8.0, 1.602), (16.0, 1.732)],
                ),
            ],
        }],
        &[
            lines("range-lock", "100-held-disjoint", Across::Threads, "100 held, disjoint"),
            lines("range-lock", "100-held-interleaved", Across::Threads, "100 held, interleaved"),
            lines("range-lock", "1-held-disjoint", Across::Threads, "1 held, disjoint"),
        ],
    ),
    section(
        "One wake-up for a batch",
        &["wakeups"],
        "Is a thread that waits for so many completions woken once, or for each? Linux AIO woke for each: \
         13,700 context switches a second where 42 to 49 do.",
        &[Published {
            title: "Linux AIO, the same throughput",
            across: "0: woken for each, 1: for a batch",
            up: "context switches/s",
            series: &[("io_getevents", &[(0.0, 13_700.0), (1.0, 49.0)])],
        }],
        &[],
    ),
    section(
        "Around the hit",
        &["around-the-hit"],
        "What does all else cost, where the kernel has the same bytes in its cache?",
        &[],
        &[],
    ),
    section(
        "One cache for several processes",
        &["shared"],
        "What does a hit cost in the cache of another process, which is mapped read-only?",
        &[],
        &[],
    ),
    section(
        "Writes",
        &["write", "stalls", "untorn"],
        "How long until writes are durable, and which threads wait?",
        &[],
        &[],
    ),
    section(
        "Programs",
        &["programs"],
        "What do programs gain or lose under millpond run, as they are?",
        &[],
        &[],
    ),
];

pub const CASES: [Case; 39] = [
    case("cached-read", "random-4k", "4 KiB at random over 256 MiB"),
    case("cached-read", "random-16k", "16 KiB at random over 256 MiB, page size 16 KiB"),
    case("cached-read", "read2-4k", "one 1 MiB file in order, all threads over the same pages"),
    case("cached-read", "pread3-4k", "one 4 MiB file, each thread over its own part"),
    case("cached-read", "sequential-512", "512 bytes in order over 256 MiB"),
    case(
        "cached-read",
        "cold-random-4k",
        "4 KiB at random, a 64th of the file cached, O_DIRECT backing",
    ),
    case(
        "cached-read",
        "fio-randread-4k",
        "fio (psync, 4 KiB at random of a file of that size) under `millpond run`; the peers are fio on the kernel, and under a library whose `pread` is a `memcpy`",
    ),
    case(
        "around-the-hit",
        "miss-4k",
        "4 KiB at random, a 16th of the file cached, no block again before all others; the kernel has all",
    ),
    case(
        "around-the-hit",
        "overwrite-4k",
        "4 KiB overwritten at random, all cached, in one file or one for each thread; mode back, or through",
    ),
    case(
        "around-the-hit",
        "open-read-close",
        "opens 1,000 files in turn by the library, reads 4 KiB of each, closes it",
    ),
    case(
        "around-the-hit",
        "direct-null",
        "direct reads of 4 KiB of a device that completes at once, 32 under way, beside as many NOPs of an io_uring",
    ),
    case(
        "around-the-hit",
        "open-files-write-sync",
        "many open files on that device, each written and synced once, beside 1,000",
    ),
    case(
        "shared",
        "hit-",
        "so many bytes at random of a cached file of 1 or 256 MiB, in shared memory with huge or with small pages",
    ),
    case(
        "async-read",
        "cold-random-4k",
        "4 KiB at random of a file 8 times the cache, each a miss; O_DIRECT backing",
    ),
    case(
        "async-read",
        "fio-libaio-cold-4k",
        "fio by libaio, 32 in flight, under `millpond run --backing direct`, the file 8 times the cache",
    ),
    case("async-read", "cached-random-4k", "a future of a cached read, polled, beside the call"),
    case(
        "wakeups",
        "1-waiter",
        "one waiter for so many completions, of which 20,000 come a second",
    ),
    case("wakeups", "4-waiters-min-8", "four waiters, 8 each"),
    case(
        "wakeups",
        "4-waiters-min-1-2-8-32",
        "four waiters for 1, 2, 8 and 32; 64 reads of a device are kept in flight",
    ),
    case(
        "write",
        "sequential-1m",
        "1 MiB in order, a new file or (`-overwrite`) one that is there, four times the cache, and one sync; mode back, O_DIRECT",
    ),
    case(
        "write",
        "random-4k-sync",
        "4 KiB at random over a cached file of 256 MiB, and one sync; mode back, O_DIRECT",
    ),
    case("write", "commit", "4 KiB at the end of a new file, each durable before the next"),
    case(
        "write",
        "through-4k",
        "4 KiB at random over a file of 256 MiB that both have cached, no sync",
    ),
    case(
        "untorn",
        "update-16k",
        "16 KiB at random over a cached file, so many pages for each sync, on XFS on a loop device; mode back, O_DIRECT",
    ),
    case(
        "no-copy",
        "null-read",
        "reads at random of a device that completes at once, 128 under way, in segments of 4 KiB",
    ),
    case("no-copy", "null-write", "writes, likewise"),
    case(
        "no-copy",
        "direct-",
        "direct requests to the disk, beside fio with io_uring, registered files and buffers",
    ),
    case(
        "mixed",
        "warm-",
        "so many readers and writers at random of one file, all of it cached; mode back, O_DIRECT",
    ),
    case(
        "mixed",
        "beyond-",
        "the same with a file four times the cache; the kernel in a memory cgroup of the same limit",
    ),
    case("mixed", "writers-", "8 writers, each in a part of its own"),
    case("mixed", "hammer-", "one writer and one reader of one page"),
    case(
        "mixed",
        "extents-",
        "the lower half of a file, while a thread punches, truncates and appends in the upper half, beside the same with that thread at another file, and without it",
    ),
    case(
        "mixed",
        "synced-",
        "hits, while a thread writes a block and syncs, over and over, beside hits alone",
    ),
    case(
        "stalls",
        "sync-under-writers",
        "a sync while 4 threads overwrite 4 KiB at random; 64 MiB may be dirty",
    ),
    case(
        "stalls",
        "append-",
        "appends of 4 KiB by 2 threads, while 2 threads write at the present end of the file",
    ),
    case(
        "stalls",
        "evict-",
        "overwrites of 16 cached pages, while another thread misses, the cache is full and each page was used twice",
    ),
    case(
        "range-lock",
        "",
        "lock and unlock: 4 KiB ranges, so many held by each thread; `shared-*` for reading; `same-range` and `full-range` all threads at once",
    ),
    case(
        "programs",
        "fio-",
        "fio, 4 threads that read and 4 that write, 8 KiB at random, XFS, `--mode back`, or (`-mapped`) the default",
    ),
    case("programs", "", "the program named, from its start to its end, under `millpond run`"),
];

/// The description of a case: the entry with the longest matching prefix.
pub fn what(suite: &str, name: &str) -> Option<&'static Case> {
    let known = CASES.iter().filter(|case| case.suite == suite && name.starts_with(case.cases));
    known.max_by_key(|case| case.cases.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_beginning_says_what_is_done() {
        let what = |suite, name| what(suite, name).map(|case| case.cases);
        assert_eq!(what("wakeups", "4-waiters-min-8"), Some("4-waiters-min-8"));
        assert_eq!(what("programs", "tar-create"), Some(""));
        assert_eq!(what("mixed", "nothing"), None);
    }
}
