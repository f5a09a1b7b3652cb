//! Checks whether a recorded concurrent history of one file is linearizable.
//!
//! *Search*, after Wing and Gong (J. Parallel Distrib. Comput. 1993) and Lowe (2017): take any
//! operation that was invoked before the first of the others returned, check whether the present
//! state of the file explains its outcome, and go on with the state that it produces. A pair of the
//! operations taken so far and the state is tried once. The pair itself is stored, not a hash of
//! it, so no collision can hide a pair. An operation that changes nothing and is explained now is
//! taken at once: if a valid order took it later, it could be moved here.
//!
//! *Cells.* The file is a row of cells, of any length in bytes, which may straddle pages. All
//! operations begin and end between cells. A cell is zero, or identifies the operation that wrote
//! it and the cell's position in that write. The size is in bytes.
//!
//! *Partition.* Linearizability is local (Herlihy and Wing 1990): if each operation concerns one
//! object, a history is linearizable if the history of each object is. The objects are chosen for
//! this: cells that one operation touches are one object; so are the size and all cells from
//! `floor` on, the lowest size that any operation has set. Below `floor` the file is never shorter
//! than the end of an operation, so its outcome and effect don't depend on the size and don't
//! change it. Operations that read the size, or end beyond `floor` (appends, truncations, reads
//! near the end), belong to the object of the size.
//!
//! *Failures.* The effect of a failed operation is in doubt: each cell has its old value, or the
//! new one, or is torn, and the size is anything between; all at one moment. A read that shows one
//! of them ends the doubt, since stored bytes do not change by themselves. Only the length that a
//! failed `allocate` added may appear later: when another operation reads the back end's length
//! (`Op::Adopt`), which failing operations and `invalidate` do.

use std::collections::HashSet;
use std::fmt;

/// The contents of a cell, or two contents of which it has one. `ANY`: some mixture.
type Cell = (u16, u16);
pub const ZERO: u16 = 0;
/// A cell that was read with bytes of several contents.
pub const TORN: u16 = 0xFFFE;
const ANY: Cell = (0xFFFF, 0xFFFF);

/// The content of a cell: part `part` of what operation `value`, from 1 on, wrote.
pub fn stamp(value: u8, part: usize) -> u16 {
    u16::from(value) << 8 | (part as u16 + 1)
}

/// Offsets and lengths in cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Returns at most `limit_bytes`.
    Read {
        at: usize,
        len: usize,
        limit_bytes: usize,
    },
    Write {
        at: usize,
        len: usize,
        value: u8,
    },
    Append {
        len: usize,
        value: u8,
    },
    Truncate {
        len: usize,
    },
    /// Makes zero.
    Clear {
        at: usize,
        len: usize,
    },
    Allocate {
        at: usize,
        len: usize,
    },
    Len,
    /// The engine takes over the back end's length.
    Adopt,
    /// Has no effect on the contents.
    Nothing,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// Read: the bytes, and the cells that they are, the last one perhaps in part.
    Read {
        bytes: usize,
        cells: Vec<u16>,
    },
    /// Appended or written, from byte `at` on.
    Wrote {
        at: usize,
        bytes: usize,
    },
    Len(usize),
    Failed,
}

#[derive(Debug, Clone)]
pub struct Call {
    pub thread: usize,
    pub invoked: u64,
    pub returned: u64,
    pub op: Op,
    pub outcome: Outcome,
    /// The form of the call, for messages.
    pub how: String,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { thread, invoked, returned, op, how, .. } = self;
        write!(f, "{invoked:3} ..{returned:3}  thread {thread}  {how}: {op:?} -> ")?;
        match &self.outcome {
            Outcome::Read { bytes, cells } => {
                write!(f, "{bytes} bytes:")?;
                cells.iter().try_for_each(|&cell| match cell {
                    ZERO => write!(f, " 0"),
                    TORN => write!(f, " TORN"),
                    _ => write!(f, " {}.{}", cell >> 8, (cell & 0xFF) - 1),
                })
            }
            outcome => write!(f, "{outcome:?}"),
        }
    }
}

/// A file: cells, those from the size on zero; and the size, which lies between `lo` and `hi`.
#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    lo: usize,
    hi: usize,
    /// A possible later length of the back end's file after a failure, with zeros up to it; 0: no
    /// longer than now.
    late: usize,
    cells: Box<[Cell]>,
}

#[derive(Clone)]
pub struct History {
    pub cell_bytes: usize,
    /// The cells before the first call.
    pub initial: Vec<u16>,
    pub calls: Vec<Call>,
}

impl History {
    /// A minimal set of calls of the first object that no order explains; `None` if the history is
    /// linearizable.
    pub fn violation(&self) -> Option<Vec<Call>> {
        let part = self.objects().into_iter().find(|calls| !self.explains(calls, &[]))?;
        Some(self.minimised(part))
    }

    /// Leaves out calls that do not take part in the contradiction: calls without effect, if the
    /// contradiction stays without them; others, if it stays whether they happened or not.
    fn minimised(&self, mut calls: Vec<Call>) -> Vec<Call> {
        let mut optional = vec![false; calls.len()];
        for at in (0..calls.len()).rev() {
            if matches!(calls[at].op, Op::Read { .. } | Op::Len | Op::Nothing) {
                let (call, was) = (calls.remove(at), optional.remove(at));
                if self.explains(&calls, &optional) {
                    calls.insert(at, call);
                    optional.insert(at, was);
                }
            } else {
                optional[at] = true;
                optional[at] = !self.explains(&calls, &optional);
            }
        }
        // And calls whose bytes were read.
        let values = |call: &Call| match &call.outcome {
            Outcome::Read { cells, .. } => cells.iter().map(|cell| (cell >> 8) as u8).collect(),
            _ => Vec::new(),
        };
        let seen: HashSet<u8> = calls.iter().flat_map(values).collect();
        let mut needed = optional.into_iter().map(|optional| !optional);
        calls.retain(|call| {
            let is_needed = needed.next().expect("one for each call");
            match call.op {
                Op::Write { value, .. } | Op::Append { value, .. } => {
                    is_needed || seen.contains(&value)
                }
                _ => is_needed,
            }
        });
        calls
    }

    /// The calls object by object; see the module's header.
    fn objects(&self) -> Vec<Vec<Call>> {
        let cuts = self.calls.iter().filter_map(|call| match call.op {
            Op::Truncate { len } => Some(len),
            _ => None,
        });
        let floor = cuts.fold(self.initial.len(), usize::min);
        // For each cell below `floor`, and `floor` for the rest, a representative of its object.
        let mut same: Vec<usize> = (0..=floor).collect();
        let find = |same: &[usize], mut at: usize| {
            while same[at] != at {
                at = same[at];
            }
            at
        };
        let first_of = |call: &Call| {
            let (at, end) = match call.op {
                Op::Read { at, len, .. }
                | Op::Write { at, len, .. }
                | Op::Clear { at, len }
                | Op::Allocate { at, len } => (at, at + len),
                Op::Append { .. } | Op::Truncate { .. } | Op::Adopt | Op::Len => (floor, floor + 1),
                Op::Nothing => return None,
            };
            Some((at.min(floor), end.min(floor + 1)))
        };
        for (at, end) in self.calls.iter().filter_map(first_of) {
            for cell in at + 1..end {
                let (one, other) = (find(&same, at), find(&same, cell));
                same[one] = other;
            }
        }
        let mut objects = vec![Vec::new(); floor + 1];
        for call in &self.calls {
            if let Some((at, _)) = first_of(call) {
                objects[find(&same, at)].push(call.clone());
            }
        }
        objects.retain(|calls| !calls.is_empty());
        objects
    }

    /// Whether some order explains all of `calls`; those that are `optional` may not have happened.
    fn explains(&self, calls: &[Call], optional: &[bool]) -> bool {
        assert!(calls.len() <= 128, "a bit for each");
        let room = |call: &Call| match call.op {
            Op::Read { .. } | Op::Clear { .. } | Op::Len | Op::Adopt | Op::Nothing => 0,
            Op::Write { at, len, .. } | Op::Allocate { at, len } => at + len,
            Op::Truncate { len } => len,
            Op::Append { .. } => 0,
        };
        let appended = |call: &Call| match call.op {
            Op::Append { len, .. } => len + 1,
            _ => 0,
        };
        let count = calls.iter().map(room).fold(self.initial.len(), usize::max)
            + calls.iter().map(appended).sum::<usize>();
        let mut cells = vec![(ZERO, ZERO); count].into_boxed_slice();
        for (cell, &value) in cells.iter_mut().zip(&self.initial) {
            *cell = (value, value);
        }
        let size = self.initial.len() * self.cell_bytes;
        let mut tried = HashSet::new();
        // Depth first; the states left to try, with the calls taken before.
        let mut open = vec![(0u128, State { lo: size, hi: size, late: 0, cells })];
        let mut next = Vec::new();
        while let Some((taken, state)) = open.pop() {
            if taken.count_ones() as usize == calls.len() {
                return true;
            }
            if !tried.insert((taken, state.clone())) {
                continue;
            }
            let left = |at: &usize| taken & (1 << at) == 0;
            let first = (0..calls.len()).filter(left).map(|at| calls[at].returned).min();
            let already = open.len();
            for at in (0..calls.len()).filter(left) {
                if Some(calls[at].invoked) > first {
                    continue;
                }
                state.after(&calls[at], self.cell_bytes, &mut next);
                let with = taken | 1 << at;
                let is_pure = matches!(calls[at].op, Op::Read { .. } | Op::Len | Op::Nothing);
                if is_pure && next.len() == 1 && next[0] == state {
                    open.truncate(already);
                    open.push((with, next.pop().expect("one")));
                    break;
                }
                if optional.get(at) == Some(&true) {
                    next.push(state.clone());
                }
                open.extend(next.drain(..).map(|state| (with, state)));
            }
        }
        false
    }
}

impl State {
    /// Adds the states that the file may have after `call`; none if it does not explain the
    /// outcome.
    fn after(&self, call: &Call, cell_bytes: usize, next: &mut Vec<State>) {
        let mut file = self.clone();
        let explained = match (call.op, &call.outcome) {
            (Op::Nothing, _)
            | (Op::Read { .. } | Op::Len | Op::Truncate { .. }, Outcome::Failed) => true,
            (Op::Read { at, limit_bytes, .. }, Outcome::Read { bytes, cells }) => {
                file.shows(at, limit_bytes, *bytes, cells, cell_bytes)
            }
            (Op::Len, &Outcome::Len(len)) => file.is_between(len, len),
            (Op::Adopt, _) => {
                file.hi = file.hi.max(file.late);
                true
            }
            (Op::Write { at, len, value }, outcome) => {
                let taken = match outcome {
                    Outcome::Wrote { bytes, .. } => *bytes,
                    _ => 0,
                };
                file.write(at * cell_bytes, len, value, taken, cell_bytes);
                true
            }
            (Op::Append { len, value }, &Outcome::Wrote { at, bytes }) => {
                file.is_between(at, at) && {
                    file.write(at, len, value, bytes, cell_bytes);
                    true
                }
            }
            (Op::Append { len, value }, _) => {
                let end = self.hi + len * cell_bytes;
                if self.lo == self.hi {
                    file.write(self.lo, len, value, 0, cell_bytes);
                } else {
                    file.cells[self.lo / cell_bytes..end.div_ceil(cell_bytes)].fill(ANY);
                    file.hi = end;
                }
                true
            }
            (Op::Truncate { len }, _) => {
                file.cells[len..].fill((ZERO, ZERO));
                (file.lo, file.hi, file.late) = (len * cell_bytes, len * cell_bytes, 0);
                true
            }
            (Op::Clear { at, len }, outcome) => {
                for cell in file.cells.iter_mut().skip(at).take(len) {
                    *cell = match outcome {
                        Outcome::Done => (ZERO, ZERO),
                        _ => in_doubt(*cell, ZERO),
                    }
                }
                true
            }
            (Op::Allocate { at, len }, outcome) => {
                let end = (at + len) * cell_bytes;
                file.hi = file.hi.max(end);
                if *outcome == Outcome::Done {
                    file.lo = file.lo.max(end);
                } else {
                    file.late = file.late.max(end);
                }
                true
            }
            (op, outcome) => panic!("{op:?} does not end with {outcome:?}"),
        };
        if explained {
            if file.late <= file.lo {
                file.late = 0;
            }
            let end = file.hi.div_ceil(cell_bytes).min(file.cells.len());
            file.cells[end..].fill((ZERO, ZERO));
            next.push(file);
        }
    }

    /// Learns that the size is from `lo` to `hi`; false if it is not.
    fn is_between(&mut self, lo: usize, hi: usize) -> bool {
        (self.lo, self.hi) = (self.lo.max(lo), self.hi.min(hi));
        self.lo <= self.hi
    }

    /// Whether a read of at most `limit` bytes may show these.
    fn shows(&mut self, at: usize, limit: usize, bytes: usize, cells: &[u16], cell: usize) -> bool {
        let start = at * cell;
        let fits = match bytes {
            _ if bytes > limit => false,
            _ if bytes == limit => self.is_between(start + limit, usize::MAX),
            0 => self.is_between(0, start),
            _ => self.is_between(start + bytes, start + bytes),
        };
        fits && cells.iter().enumerate().all(|(number, &seen)| {
            let Some(now) = self.cells.get_mut(at + number) else { return false };
            if *now == ANY || (seen == TORN && now.0 != now.1) {
                return true;
            }
            let is_one = seen == now.0 || seen == now.1;
            if is_one && (number + 1) * cell <= bytes {
                *now = (seen, seen);
            }
            is_one
        })
    }

    /// Writes `len` cells from byte `start` on; only the first `taken` bytes are certain.
    fn write(&mut self, start: usize, len: usize, value: u8, taken: usize, cell: usize) {
        let end = start + len * cell;
        if start.is_multiple_of(cell) {
            for part in 0..len {
                let (new, now) = (stamp(value, part), &mut self.cells[start / cell + part]);
                *now = if (part + 1) * cell <= taken { (new, new) } else { in_doubt(*now, new) };
            }
        } else {
            self.cells[start / cell..end.div_ceil(cell)].fill(ANY);
        }
        if taken > 0 {
            self.lo = self.lo.max(start + taken);
        }
        self.hi = self.hi.max(end);
    }
}

fn in_doubt(now: Cell, new: u16) -> Cell {
    match now {
        ANY => ANY,
        (one, other) if one == other => (one, new),
        (one, other) if new == one || new == other => now,
        _ => ANY,
    }
}
