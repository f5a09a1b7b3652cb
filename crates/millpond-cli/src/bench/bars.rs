//! What is to be reached in a case, and whether a row does.

use super::outcome::Row;

/// Which figure of a row is held against what is to be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// The ratio of ops/s: more is better.
    Ops,
    /// The peer's processor time over our own: more is better.
    Cpu,
    /// Our latency over the peer's: less is better.
    P50,
    P99,
    P999,
    /// Context switches of an operation: less is better.
    Switches,
}

/// At most one of each figure is for a row: the first in [`BARS`].
#[derive(Debug)]
pub struct Bar {
    pub suite: &'static str,
    /// What the case's name begins with; so for engine and peer.
    case: &'static str,
    engine: &'static str,
    peer: &'static str,
    threads: Option<u32>,
    depths: Option<[u32; 2]>,
    figure: Figure,
    reach: f64,
}

const fn bar(suite: &'static str, case: &'static str, peer: &'static str, reach: f64) -> Bar {
    Bar { suite, case, engine: "", peer, threads: None, depths: None, figure: Figure::Ops, reach }
}

impl Bar {
    const fn of(self, figure: Figure) -> Self {
        Self { figure, ..self }
    }

    const fn by(self, engine: &'static str) -> Self {
        Self { engine, ..self }
    }

    const fn threads(self, threads: u32) -> Self {
        Self { threads: Some(threads), ..self }
    }

    const fn depths(self, depths: [u32; 2]) -> Self {
        Self { depths: Some(depths), ..self }
    }

    fn is_for(&self, own: &Row, peer: &Row) -> bool {
        let depth = own.queue_depth.unwrap_or(0);
        own.suite == self.suite
            && own.case.starts_with(self.case)
            && own.engine.starts_with(self.engine)
            && peer.engine.starts_with(self.peer)
            && self.threads.is_none_or(|threads| threads == own.threads)
            && self.depths.is_none_or(|[least, most]| (least..=most).contains(&depth))
    }
}

const BARS: [Bar; 64] = [
    bar("cached-read", "random-4k", "memcpy", 0.9).threads(1),
    bar("cached-read", "random-4k", "kernel pread", 1.9).threads(1),
    bar("cached-read", "random-4k", "kernel pread", 2.3).threads(2),
    bar("cached-read", "random-16k", "kernel pread", 1.6).threads(1),
    bar("cached-read", "read2-4k", "kernel pread", 5.0).threads(1),
    bar("cached-read", "read2-4k", "kernel pread", 9.0).threads(2),
    bar("cached-read", "sequential-512", "kernel pread", 4.0),
    bar("cached-read", "cold-random-4k", "kernel pread", 0.95),
    bar("cached-read", "fio-randread-4k-16m", "fio, kernel", 1.6),
    bar("cached-read", "fio-randread-4k-256m", "fio, kernel", 1.25),
    bar("cached-read", "fio-", "fio, memcpy", 0.9),
    bar("around-the-hit", "miss-4k", "kernel", 0.67),
    bar("around-the-hit", "overwrite-4k-back", "kernel", 1.5),
    bar("around-the-hit", "overwrite-4k-through", "kernel", 0.9),
    bar("around-the-hit", "direct-null", "io_uring NOP", 0.67),
    bar("around-the-hit", "open-files-write-sync", "millpond", 0.77),
    bar("async-read", "cold-random-4k", "io_uring, O_DIRECT", 0.95),
    bar("async-read", "cold-random-4k", "io_uring, O_DIRECT", 0.71).of(Figure::Cpu),
    bar("async-read", "cold-random-4k", "io_uring, buffered, forced", 1.0).of(Figure::Cpu),
    bar("async-read", "cold-random-4k", "io_uring, buffered", 1.2).depths([8, 32]),
    bar("async-read", "cold-random-4k", "io_uring, buffered", 1.0),
    bar("async-read", "cached-random-4k", "millpond, read_at", 0.8),
    bar("async-read", "fio-libaio-cold-4k", "fio libaio, O_DIRECT", 0.95),
    bar("wakeups", "1-waiter-min-32", "", 0.0344).of(Figure::Switches),
    bar("wakeups", "4-waiters-min-8", "", 0.131).of(Figure::Switches),
    bar("write", "sequential-1m", "fio", 0.9),
    bar("write", "random-4k-sync", "kernel", 1.2),
    bar("write", "through-4k", "kernel", 0.8),
    bar("write", "commit", "kernel pwrite, O_DIRECT", 1.05).of(Figure::P50),
    bar("write", "commit", "kernel pwrite, O_DIRECT", 1.2).of(Figure::P99),
    bar("no-copy", "null-read-64k", "millpond, null, 4 KiB", 0.95),
    bar("no-copy", "null-read-64k", "millpond, null, vectors", 1.3),
    bar("no-copy", "null-read-4k", "io_uring NOP", 1.0),
    bar("no-copy", "direct-", "fio", 0.95),
    bar("no-copy", "direct-read-4k", "fio", 0.91).of(Figure::Cpu),
    bar("mixed", "warm-8k-8+8-reads", "kernel, ext", 1.2),
    bar("mixed", "warm-8k-8+8-writes", "kernel, xfs", 1.2),
    bar("mixed", "beyond-8k-8+8-reads", "kernel, xfs", 5.0),
    bar("mixed", "beyond-8k-8+8-writes", "kernel, xfs", 1.0),
    bar("mixed", "beyond-8k-8+8", "kernel, ext2/3/4, O_DIRECT", 0.0),
    bar("mixed", "beyond-8k-8+8", "kernel, ext", 1.0),
    bar("mixed", "warm-64k-4+4-total", "kernel, ext", 1.2),
    bar("mixed", "writers-8k-8", "kernel, xfs", 1.8),
    bar("mixed", "hammer-4k-1+1-reads", "kernel, xfs", 0.25),
    bar("mixed", "hammer-4k-1+1-writes", "kernel, xfs", 10.0),
    bar("mixed", "extents-", "millpond, another", 0.9),
    bar("mixed", "synced-8k-1", "millpond", 3.0).by("millpond").of(Figure::P999),
    bar("range-lock", "1-held-disjoint", "parking_lot RwLock, shared", 0.85).threads(1),
    bar("range-lock", "1-held-disjoint", "parking_lot RwLock, shared", 5.0).threads(2),
    bar("range-lock", "1-held-disjoint", "parking_lot RwLock, shared", 4.0).threads(8),
    bar("range-lock", "100-held-", "interval-tree", 1.0).threads(1),
    bar("range-lock", "100-held-", "interval-tree", 5.0),
    bar("range-lock", "100-held-", "", 1.0),
    bar("range-lock", "shared-full-range", "parking_lot RwLock, shared", 0.85),
    bar("range-lock", "same-range", "parking_lot RwLock, fair", 0.8).threads(2),
    bar("programs", "sqlite-transaction-x5", "", 1.25),
    bar("programs", "sqlite-autocommit-x5", "", 1.25),
    bar("programs", "sqlite", "", 1.0),
    bar("programs", "kv-fourth", "", 1.4),
    bar("programs", "fio-4+4-reads", "", 10.0),
    bar("programs", "pread-4k", "", 8.0),
    bar("programs", "pwrite-4k-back", "", 1.3),
    bar("programs", "pwrite-4k-through", "", 0.9),
    bar("programs", "", "", 0.95),
];

/// A figure beside what was to be reached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Judged {
    pub figure: Figure,
    pub reach: f64,
    pub found: f64,
}

impl Judged {
    pub fn is_reached(&self) -> bool {
        match self.figure {
            Figure::Ops | Figure::Cpu => self.found >= self.reach,
            Figure::P50 | Figure::P99 | Figure::P999 | Figure::Switches => self.found <= self.reach,
        }
    }

    /// In words: what was to be reached.
    pub fn told(&self) -> String {
        let Self { reach, .. } = self;
        match self.figure {
            Figure::Ops => format!("{reach}"),
            Figure::Cpu => format!("processor time {reach}"),
            Figure::P50 => format!("p50 at most {reach}"),
            Figure::P99 => format!("p99 at most {reach}"),
            Figure::P999 => format!("p99.9 at most {reach}"),
            Figure::Switches => format!("switches at most {reach}"),
        }
    }
}

/// The peer's processor time of an operation over our own.
pub fn cpu_ratio(own: &Row, peer: &Row) -> Option<f64> {
    (own.cpu_ns_per_op > 0.0).then(|| peer.cpu_ns_per_op / own.cpu_ns_per_op)
}

/// What a row is held against, and what it has.
pub fn judge(own: &Row, peer: &Row) -> Vec<Judged> {
    let over = |own: Option<f64>, peer: Option<f64>| Some(own? / peer?);
    let mut judged: Vec<Judged> = Vec::new();
    for bar in BARS.iter().filter(|bar| bar.is_for(own, peer)) {
        let found = match bar.figure {
            Figure::Ops => own.ratio_median,
            Figure::Cpu => cpu_ratio(own, peer),
            Figure::P50 => over(own.p50_ns, peer.p50_ns),
            Figure::P99 => over(own.p99_ns, peer.p99_ns),
            Figure::P999 => over(own.p999_ns, peer.p999_ns),
            Figure::Switches => Some(own.context_switches_per_op),
        };
        let is_known = judged.iter().any(|known| known.figure == bar.figure);
        if let (Some(found), false) = (found, is_known) {
            judged.push(Judged { figure: bar.figure, reach: bar.reach, found });
        }
    }
    // A bar of 0 says that there is none, where a more general one follows.
    judged.retain(|judged| judged.reach > 0.0);
    judged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::sample;

    #[test]
    fn the_first_bar_that_fits_counts() {
        let report = sample();
        let (mut own, mut peer) = (report.rows[0].clone(), report.rows[1].clone());
        (own.suite, own.case, own.queue_depth) = ("async-read", "cold-random-4k", Some(8));
        peer.engine = "io_uring, buffered".into();
        let told = |own: &Row, peer: &Row| {
            let judged = judge(own, peer);
            judged.iter().map(|one| (one.reach, one.is_reached())).collect::<Vec<_>>()
        };
        assert_eq!(told(&own, &peer), [(1.2, true)]);
        own.queue_depth = Some(64);
        own.ratio_median = Some(0.9);
        assert_eq!(told(&own, &peer), [(1.0, false)]);
        (own.suite, own.case) = ("write", "commit");
        (own.p50_ns, own.p99_ns) = (Some(1000.0), Some(1000.0));
        peer.engine = "kernel pwrite, O_DIRECT, O_DSYNC".into();
        assert_eq!(told(&own, &peer), [(1.05, false), (1.2, true)]);
    }
}
