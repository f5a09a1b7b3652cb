//! Simulates an operation on many processors, from the cache lines that it shares.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::Write;

use super::trace::SharedLine;

/// The time in which a line comes to another processor's cache.
const TRANSFER_NS: u64 = 50;
const PROCESSORS: [usize; 4] = [2, 16, 64, 192];
/// Operations of a simulation.
const OPERATIONS: u64 = 20_000;

/// An operation.
pub struct Row {
    pub name: &'static str,
    /// Its time on one processor.
    pub local_ns: u64,
    /// The lines that it shares: in one file, and with a file for each processor.
    pub shared: [Vec<SharedLine>; 2],
}

/// A cache line. Its visitors come one after the other.
#[derive(Clone, Copy)]
struct Line {
    owner: usize,
    free_at: u64,
}

/// The operations a second of all `processors` together. Each processor repeats the operation: its
/// own work in equal parts, with a visit of a shared line between two parts. A line that another
/// processor visited last takes a transfer to come. A line without a common word has two visitors.
pub fn operations_per_second(processors: usize, local_ns: u64, shared: &[SharedLine]) -> f64 {
    let order: Vec<usize> = shared
        .iter()
        .enumerate()
        .flat_map(|(number, line)| std::iter::repeat_n(number, line.visits as usize))
        .collect();
    let part_ns = local_ns.max(1) / (order.len() as u64 + 1);
    let sets = processors.div_ceil(2);
    let mut lines = vec![Line { owner: usize::MAX, free_at: 0 }; sets * shared.len()];
    // The time of a processor's next visit, its number, and the place of the visit in the order.
    // The processors begin one after the other: processors in step would collide at each line.
    let mut events: BinaryHeap<_> = (0..processors)
        .map(|it| Reverse((local_ns.max(1) * it as u64 / processors as u64, it, 0)))
        .collect();
    let (mut done, mut now) = (0, 1);
    while done < OPERATIONS {
        let Reverse((at, processor, place)) = events.pop().expect("one for each processor");
        now = at;
        let (next_at, next) = match order.get(place) {
            Some(&number) => {
                let set = if shared[number].has_common_word { 0 } else { processor / 2 };
                let line = &mut lines[set * shared.len() + number];
                let cost = if line.owner == processor { 0 } else { TRANSFER_NS };
                line.free_at = at.max(line.free_at) + cost;
                line.owner = processor;
                (line.free_at + part_ns, place + 1)
            }
            None => {
                done += 1;
                (at + part_ns, 0)
            }
        };
        events.push(Reverse((next_at, processor, next)));
    }
    done as f64 * 1e9 / now.max(1) as f64
}

/// Goal: the simulation agrees with two cases that are known: without a shared line the rate grows
/// with the processors; with one line it ends at the rate of the line's transfers.
#[test]
fn known_rates_are_found() {
    let alone = operations_per_second(1, 1000, &[]);
    assert!((0.9e6..1.1e6).contains(&alone), "{alone}");
    let free = operations_per_second(64, 1000, &[]);
    assert!((60.0 * alone..68.0 * alone).contains(&free), "{free}");
    let line = |visits, has_common_word| SharedLine { visits, has_common_word };
    let bound = operations_per_second(192, 1000, &[line(1, true)]);
    assert!((19e6..21e6).contains(&bound), "{bound}");
    let twice = operations_per_second(192, 1000, &[line(2, true), line(1, true)]);
    assert!((9e6..11e6).contains(&twice), "{twice}");
    let pairs = operations_per_second(192, 1000, &[line(1, false)]);
    assert!((180e6..193e6).contains(&pairs), "{pairs}");
}

/// Writes the tables into docs/scaling.md, between their marks.
pub fn write_tables(rows: &[Row]) {
    let mut counted =
        String::from("| operation, 4 KiB | one file | a file each |\n|---|---|---|\n");
    let mut simulated = String::from("| millions a second, in total | time on one processor |");
    PROCESSORS.iter().for_each(|it| write!(simulated, " {it} |").unwrap());
    simulated.push_str("\n|---|---|");
    PROCESSORS.iter().for_each(|_| simulated.push_str("---|"));
    simulated.push('\n');
    for row in rows {
        let [one, each] = row.shared.each_ref().map(Vec::len);
        writeln!(counted, "| {} | {one} | {each} |", row.name).unwrap();
        for (shared, files) in row.shared.iter().zip(["one file", "a file each"]) {
            write!(simulated, "| {}, {files} | {} ns |", row.name, row.local_ns).unwrap();
            for processors in PROCESSORS {
                let rate = operations_per_second(processors, row.local_ns, shared) / 1e6;
                let digits = [(0.1, 3), (1.0, 2), (10.0, 1)].into_iter().find(|it| rate < it.0);
                let digits = digits.map_or(0, |it| it.1);
                write!(simulated, " {rate:.digits$} |").unwrap();
            }
            simulated.push('\n');
        }
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scaling.md");
    let mut text = std::fs::read_to_string(path).unwrap();
    for (name, table) in [("counted", counted), ("simulated", simulated)] {
        let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
        let from = text.find(&begin).expect("a mark in docs/scaling.md") + begin.len();
        let to = text.find(&end).expect("a mark in docs/scaling.md");
        text.replace_range(from..to, &format!("\n{table}\n"));
    }
    std::fs::write(path, text).unwrap();
}
