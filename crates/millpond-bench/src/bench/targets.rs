//! The targets of the benchmark's cases, and whether a row meets them.

use super::outcome::Row;

/// The measurement of a row that a target applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// The ratio of ops/s: more is better.
    Ops,
    /// The baseline's processor time over Millpond's: more is better.
    Cpu,
    /// Millpond's latency over the baseline's: less is better.
    P50,
    P99,
    P999,
    /// Context switches of an operation: less is better.
    Switches,
}

/// A target of some rows. Of each measurement the first matching entry of [`TARGETS`] counts.
#[derive(Debug)]
pub struct RowTarget {
    pub suite: &'static str,
    /// A prefix of the case's name, as for `engine` and `baseline`.
    case: &'static str,
    engine: &'static str,
    baseline: &'static str,
    threads: Option<u32>,
    depths: Option<[u32; 2]>,
    figure: Figure,
    bound: f64,
}

const fn target(
    suite: &'static str,
    case: &'static str,
    baseline: &'static str,
    bound: f64,
) -> RowTarget {
    RowTarget {
        suite,
        case,
        engine: "",
        baseline,
        threads: None,
        depths: None,
        figure: Figure::Ops,
        bound,
    }
}

impl RowTarget {
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

    fn is_for(&self, own: &Row, baseline: &Row) -> bool {
        let depth = own.queue_depth.unwrap_or(0);
        own.suite == self.suite
            && own.case.starts_with(self.case)
            && own.engine.starts_with(self.engine)
            && baseline.engine.starts_with(self.baseline)
            && self.threads.is_none_or(|threads| threads == own.threads)
            && self.depths.is_none_or(|[least, most]| (least..=most).contains(&depth))
    }
}

const TARGETS: [RowTarget; 84] = [
    target("cached-read", "random-4k", "kernel pread", 1.6).by("millpond, mapped"),
    target("cached-read", "sequential-512", "kernel pread", 3.0).by("millpond, mapped"),
    target("write", "through-4k", "kernel", 0.95).by("millpond, through, mapped"),
    target("async-read", "cold-random-4k", "io_uring, buffered", 1.0).by("millpond, queue, mapped"),
    target("mixed", "warm-8k-8+8-reads", "kernel, ext", 1.6).by("millpond, mapped"),
    target("mixed", "warm-8k-8+8-writes", "kernel, ext", 1.3).by("millpond, mapped"),
    target("mixed", "warm-8k-8+8-reads", "kernel, xfs", 5.0).by("millpond, mapped"),
    target("cached-read", "random-4k", "memcpy", 0.9).threads(1),
    target("cached-read", "random-4k", "kernel pread", 1.9).threads(1),
    target("cached-read", "random-4k", "kernel pread", 2.3).threads(2),
    target("cached-read", "random-16k", "kernel pread", 1.6).threads(1),
    target("cached-read", "read2-4k", "kernel pread", 5.0).threads(1),
    target("cached-read", "read2-4k", "kernel pread", 9.0).threads(2),
    target("cached-read", "sequential-512", "kernel pread", 4.0),
    target("cached-read", "cold-random-4k", "kernel pread", 0.95),
    target("cached-read", "fio-randread-4k-16m", "fio, kernel", 1.6),
    target("cached-read", "fio-randread-4k-256m", "fio, kernel", 1.25),
    target("cached-read", "fio-", "fio, memcpy", 0.9),
    target("around-the-hit", "miss-4k", "kernel", 0.67),
    target("around-the-hit", "overwrite-4k-back", "kernel", 1.5),
    target("around-the-hit", "overwrite-4k-through", "kernel", 0.9),
    target("around-the-hit", "overwrite-4k-mapped", "kernel", 0.95),
    target("around-the-hit", "direct-null", "io_uring NOP", 0.67),
    target("around-the-hit", "open-read-close", "kernel", 0.7),
    target("around-the-hit", "open-files-write-sync", "millpond", 0.77),
    target("async-read", "cold-random-4k", "io_uring, O_DIRECT", 0.95),
    target("async-read", "cold-random-4k", "io_uring, O_DIRECT", 0.71).of(Figure::Cpu),
    target("async-read", "cold-random-4k", "io_uring, buffered, forced", 1.0).of(Figure::Cpu),
    target("async-read", "cold-random-4k", "io_uring, buffered", 1.2).depths([8, 32]),
    target("async-read", "cold-random-4k", "io_uring, buffered", 1.0),
    target("async-read", "cached-random-4k", "millpond, read_at", 0.8),
    target("async-read", "fio-libaio-cold-4k", "fio libaio, O_DIRECT", 0.95),
    target("wakeups", "1-waiter-min-32", "", 0.0344).of(Figure::Switches),
    target("wakeups", "4-waiters-min-8", "", 0.131).of(Figure::Switches),
    target("write", "sequential-1m", "fio", 0.9),
    target("write", "random-4k-sync", "kernel", 1.2),
    target("write", "through-4k", "kernel", 0.8),
    target("write", "commit", "kernel pwrite, O_DIRECT", 1.03).of(Figure::P50),
    target("write", "commit", "kernel pwrite, O_DIRECT", 1.2).of(Figure::P99),
    target("shared", "hit-4k-1m-huge", "millpond, private", 0.91),
    target("shared", "hit-4k-256m-huge", "millpond, private", 0.91),
    target("shared", "hit-4k-1m-small", "millpond, private", 0.71),
    target("shared", "hit-4k-256m-small", "millpond, private", 0.71),
    target("untorn", "update-16k", "millpond, written twice", 1.6),
    target("untorn", "update-16k", "millpond, written twice", 1.0).of(Figure::P99),
    target("untorn", "update-16k", "millpond, unprotected", 0.85),
    target("no-copy", "null-read-64k", "millpond, null, 4 KiB", 0.95),
    target("no-copy", "null-read-64k", "millpond, null, vectors", 1.3),
    target("no-copy", "null-read-4k", "io_uring NOP", 1.0),
    target("no-copy", "direct-", "fio", 0.95),
    target("no-copy", "direct-read-4k", "fio", 0.91).of(Figure::Cpu),
    target("mixed", "warm-8k-8+8-reads", "kernel, ext", 1.2),
    target("mixed", "warm-8k-8+8-writes", "kernel, xfs", 1.2),
    target("mixed", "beyond-8k-8+8-reads", "kernel, xfs", 5.0),
    target("mixed", "beyond-8k-8+8-writes", "kernel, xfs", 1.0),
    target("mixed", "beyond-8k-8+8", "kernel, ext2/3/4, O_DIRECT", 0.0),
    target("mixed", "beyond-8k-8+8", "kernel, ext", 1.0),
    target("mixed", "warm-64k-4+4-reads", "kernel, ext", 0.9),
    target("mixed", "warm-64k-8+8-reads", "kernel, ext", 0.9),
    target("mixed", "warm-64k-4+4-total", "kernel, ext", 1.2),
    target("mixed", "writers-8k-8", "kernel, xfs", 1.8),
    target("mixed", "hammer-4k-1+1-reads", "kernel, xfs", 0.25),
    target("mixed", "hammer-4k-1+1-writes", "kernel, xfs", 10.0),
    target("mixed", "extents-", "millpond, another", 0.9),
    target("mixed", "synced-8k-1", "millpond", 3.0).by("millpond").of(Figure::P999),
    target("stalls", "append-", "kernel", 1.0),
    target("range-lock", "1-held-disjoint", "parking_lot RwLock, shared", 0.85).threads(1),
    target("range-lock", "1-held-disjoint", "parking_lot RwLock, shared", 5.0).threads(2),
    target("range-lock", "1-held-disjoint", "parking_lot RwLock, shared", 4.0).threads(8),
    target("range-lock", "100-held-", "interval-tree", 1.0).threads(1),
    target("range-lock", "100-held-", "interval-tree", 5.0),
    target("range-lock", "100-held-", "", 1.0),
    target("range-lock", "shared-full-range", "parking_lot RwLock, shared", 0.85),
    target("range-lock", "same-range", "parking_lot RwLock, fair", 0.8).threads(2),
    target("programs", "sqlite-transaction-x5", "", 1.25),
    target("programs", "sqlite-autocommit-x5", "", 1.25),
    target("programs", "sqlite", "", 1.0),
    target("programs", "kv-fourth", "", 1.4),
    target("programs", "fio-4+4-reads", "", 10.0),
    target("programs", "fio-4+4-mapped-reads", "", 5.0),
    target("programs", "fio-4+4-mapped-writes", "", 0.4),
    target("programs", "pread-4k", "", 8.0),
    target("programs", "pwrite-4k-back", "", 1.3),
    target("programs", "", "", 0.95),
];

/// A measurement and its target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TargetResult {
    pub figure: Figure,
    pub bound: f64,
    pub found: f64,
}

impl TargetResult {
    pub fn is_met(&self) -> bool {
        match self.figure {
            Figure::Ops | Figure::Cpu => self.found >= self.bound,
            Figure::P50 | Figure::P99 | Figure::P999 | Figure::Switches => self.found <= self.bound,
        }
    }

    /// The target in words.
    pub fn description(&self) -> String {
        let Self { bound, .. } = self;
        match self.figure {
            Figure::Ops => format!("{bound}"),
            Figure::Cpu => format!("processor time {bound}"),
            Figure::P50 => format!("p50 at most {bound}"),
            Figure::P99 => format!("p99 at most {bound}"),
            Figure::P999 => format!("p99.9 at most {bound}"),
            Figure::Switches => format!("switches at most {bound}"),
        }
    }
}

/// The baseline's processor time of an operation over Millpond's.
pub fn cpu_ratio(own: &Row, baseline: &Row) -> Option<f64> {
    (own.cpu_ns_per_op > 0.0).then(|| baseline.cpu_ns_per_op / own.cpu_ns_per_op)
}

/// The targets of a row, with its measurements.
pub fn judge(own: &Row, baseline: &Row) -> Vec<TargetResult> {
    let over = |own: Option<f64>, baseline: Option<f64>| Some(own? / baseline?);
    let mut judged: Vec<TargetResult> = Vec::new();
    for target in TARGETS.iter().filter(|target| target.is_for(own, baseline)) {
        let found = match target.figure {
            Figure::Ops => own.ratio_median,
            Figure::Cpu => cpu_ratio(own, baseline),
            Figure::P50 => over(own.p50_ns, baseline.p50_ns),
            Figure::P99 => over(own.p99_ns, baseline.p99_ns),
            Figure::P999 => over(own.p999_ns, baseline.p999_ns),
            Figure::Switches => Some(own.context_switches_per_op),
        };
        let is_known = judged.iter().any(|known| known.figure == target.figure);
        if let (Some(found), false) = (found, is_known) {
            judged.push(TargetResult { figure: target.figure, bound: target.bound, found });
        }
    }
    // An entry of 0 means no target, although a more general entry follows.
    judged.retain(|judged| judged.bound > 0.0);
    judged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::sample;

    #[test]
    fn the_first_matching_target_counts() {
        let report = sample();
        let (mut own, mut baseline) = (report.rows[0].clone(), report.rows[1].clone());
        (own.suite, own.case, own.queue_depth) = ("async-read", "cold-random-4k", Some(8));
        baseline.engine = "io_uring, buffered".into();
        let description = |own: &Row, baseline: &Row| {
            let judged = judge(own, baseline);
            judged.iter().map(|one| (one.bound, one.is_met())).collect::<Vec<_>>()
        };
        assert_eq!(description(&own, &baseline), [(1.2, true)]);
        own.queue_depth = Some(64);
        own.ratio_median = Some(0.9);
        assert_eq!(description(&own, &baseline), [(1.0, false)]);
        (own.suite, own.case) = ("write", "commit");
        (own.p50_ns, own.p99_ns) = (Some(1000.0), Some(1000.0));
        baseline.engine = "kernel pwrite, O_DIRECT, O_DSYNC".into();
        assert_eq!(description(&own, &baseline), [(1.03, false), (1.2, true)]);
    }
}
