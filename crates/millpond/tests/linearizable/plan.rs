//! Plans the operations of a history's threads: random ones, on cells of the file.

use crate::common::Random;
use crate::history::Op;

/// The greatest number of threads of a history.
pub const THREADS: usize = 4;
pub const HANDLES: usize = 3;
/// Of a thread.
pub const STEPS_MAX: usize = 8;

/// The plan of one history.
pub struct Plan {
    pub seed: u64,
    pub page_bytes: usize,
    pub cell_bytes: usize,
    pub cells: usize,
    pub threads: Vec<Vec<Step>>,
}

/// A planned operation: its form in the model, and the API that calls it.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub op: Op,
    pub how: How,
    pub face: Face,
    pub handle: usize,
    /// Spins before the call.
    pub spins: u64,
}

/// The API of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Face {
    File,
    Async,
    Queue,
    Pipeline,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    Plain,
    Vectored,
    View,
    Dsync,
    Zero,
    WriteBack,
    Sync,
    DontNeed,
    WillNeed,
    Invalidate,
}

impl Plan {
    /// Operations of `faces`.
    pub fn new(seed: u64, page_bytes: usize, faces: &[Face]) -> Plan {
        let random = &mut Random(seed);
        // A fraction of a page, or unrelated to pages.
        let eighths = [1, 1, 2, 4, 8][random.below(5) as usize];
        let odd = if random.chance(400) { random.below(200) as usize + 1 } else { 0 };
        let cell_bytes = page_bytes / 8 * eighths + odd;
        let most = 6 * page_bytes / cell_bytes;
        let cells = 1 + random.below(most as u64) as usize;
        let handles = 1 + random.below(HANDLES as u64) as usize;
        let mut value = 1;
        // Many histories have few kinds of operations, on few pages.
        let kinds = if random.chance(500) {
            random.next() | random.next()
        } else {
            random.next() & random.next() & random.next()
        };
        let place = random.below(cells as u64) as usize;
        let hot = random.chance(500).then_some((place, 1 + page_bytes / cell_bytes));
        // Some have short reads and writes across two pages, or across the end.
        let edge = random.chance(400).then(|| match (page_bytes / cell_bytes).max(1) {
            pages if random.chance(500) && cells > pages => cells / pages * pages,
            _ => cells,
        });
        let kinds = match edge {
            Some(edge) if edge == cells => 1 << 2 | 1 << 3,
            Some(_) => 0,
            None => kinds,
        };
        // Some have operations on the whole file, which is larger than some caches.
        let longest = if random.chance(200) { most } else { (3 * page_bytes / cell_bytes).max(1) };
        let steps = |random: &mut Random| Step {
            op: Op::Nothing,
            how: How::Plain,
            face: Face::File,
            handle: random.below(handles as u64) as usize,
            spins: match random.below(10) {
                0..=4 => 0,
                5..=8 => random.below(100),
                _ => random.below(3000),
            },
        };
        let mut threads = Vec::new();
        for _ in 0..THREADS - random.below(2) as usize {
            let count = STEPS_MAX as u64 / 2 + random.below(STEPS_MAX as u64 / 2 + 1);
            let mut all = Vec::new();
            let mut face = Face::File;
            while all.len() < count as usize {
                let mut step = steps(random);
                (step.op, step.how) =
                    some_op(random, page_bytes, cell_bytes, [most, longest], hot, kinds);
                match (edge, &mut step.op) {
                    (Some(edge), Op::Read { at, len, limit_bytes }) => {
                        *at = edge.saturating_sub(1 + random.below(2) as usize);
                        *len = 2 + random.below(2) as usize;
                        *limit_bytes = *len * cell_bytes;
                    }
                    (Some(edge), Op::Write { at, len, .. }) => {
                        *at = edge.saturating_sub(1 + random.below(2) as usize);
                        *len = 2 + random.below(page_bytes as u64 / cell_bytes as u64) as usize;
                    }
                    (Some(edge), Op::Truncate { len }) => {
                        *len = edge.saturating_sub(1) + random.below(3) as usize;
                    }
                    _ => {}
                }
                if let Op::Write { value: new, .. } | Op::Append { value: new, .. } = &mut step.op {
                    value += 1;
                    *new = value;
                }
                // Batched steps of the same API are adjacent.
                if faces.len() > 1 && random.chance(500) {
                    face = faces[random.below(faces.len() as u64) as usize];
                }
                step.face = if face.has(step.op, step.how) { face } else { Face::File };
                all.push(step);
            }
            threads.push(all);
        }
        Plan { seed, page_bytes, cell_bytes, cells, threads }
    }
}

/// A random operation of at most `longest` cells on a file of at most `most`; `kinds` has a bit for
/// each permitted kind.
fn some_op(
    random: &mut Random,
    page_bytes: usize,
    cell_bytes: usize,
    [most, longest]: [usize; 2],
    hot: Option<(usize, usize)>,
    kinds: u64,
) -> (Op, How) {
    let at = match hot {
        Some((place, around)) => place + random.below(around as u64) as usize,
        None => random.below(most as u64) as usize,
    };
    let at = at.min(most - 1);
    let len = 1 + random.below((most - at).min(longest) as u64) as usize;
    let value = 0;
    let how = if random.chance(300) { How::Vectored } else { How::Plain };
    let limit_bytes = len * cell_bytes;
    loop {
        let kind = random.below(100);
        let (bit, chosen) = match kind {
            0..=25 => (63, (Op::Read { at, len, limit_bytes }, how)),
            26..=31 => {
                let rest = page_bytes - at * cell_bytes % page_bytes;
                (0, (Op::Read { at, len, limit_bytes: limit_bytes.min(rest) }, How::View))
            }
            32..=52 => (62, (Op::Write { at, len, value }, how)),
            53..=54 => (1, (Op::Write { at, len, value }, How::Dsync)),
            55..=61 => (2, (Op::Append { len: len.min(page_bytes / cell_bytes + 1), value }, how)),
            62..=68 => (3, (Op::Truncate { len: at }, How::Plain)),
            69..=72 => (4, (Op::Clear { at, len }, How::Plain)),
            73..=76 => (5, (Op::Clear { at, len }, How::Zero)),
            77..=79 => (6, (Op::Allocate { at, len }, How::Plain)),
            80..=84 => (7, (Op::Len, How::Plain)),
            85..=87 => (8, (Op::Nothing, How::WriteBack)),
            88..=89 => (9, (Op::Nothing, How::Sync)),
            90..=94 => (10, (Op::Nothing, How::DontNeed)),
            95..=97 => (11, (Op::Nothing, How::WillNeed)),
            _ => (12, (Op::Adopt, How::Invalidate)),
        };
        if bit >= 62 || kinds & (1 << bit) != 0 {
            return chosen;
        }
    }
}

impl Face {
    pub const ALL: [Face; 4] = [Face::File, Face::Async, Face::Queue, Face::Pipeline];

    fn has(self, op: Op, how: How) -> bool {
        let moves_bytes = matches!(op, Op::Read { .. } | Op::Write { .. }) && how != How::View;
        match self {
            Face::File => true,
            Face::Async => op != Op::Len,
            Face::Queue => how == How::Sync || (moves_bytes && how != How::Dsync),
            Face::Pipeline => moves_bytes,
        }
    }

    /// Whether the API has several operations in flight.
    pub fn is_batched(self) -> bool {
        matches!(self, Face::Queue | Face::Pipeline)
    }
}

impl How {
    pub fn name(self, op: Op) -> &'static str {
        match (self, op) {
            (How::View, _) => "view",
            (How::Vectored, Op::Read { .. }) => "read_vectored_at",
            (_, Op::Read { .. }) => "read_at",
            (How::Vectored, Op::Write { .. }) => "write_vectored_at",
            (How::Dsync, _) => "write_at_dsync",
            (_, Op::Write { .. }) => "write_at",
            (How::Vectored, Op::Append { .. }) => "append_vectored",
            (_, Op::Append { .. }) => "append",
            (_, Op::Truncate { .. }) => "truncate",
            (How::Zero, _) => "zero_range",
            (_, Op::Clear { .. }) => "punch_hole",
            (_, Op::Allocate { .. }) => "allocate",
            (_, Op::Len) => "len",
            (How::WriteBack, _) => "write_back",
            (How::Sync, _) => "sync_data",
            (How::DontNeed, _) => "advise DontNeed",
            (How::WillNeed, _) => "advise WillNeed",
            (_, Op::Nothing | Op::Adopt) => "invalidate",
        }
    }
}
