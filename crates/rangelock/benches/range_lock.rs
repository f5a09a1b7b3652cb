//! Prints the table of `millpond bench range-lock`.
//!
//! `cargo bench -p millpond-rangelock --features bench -- [--quick] [--threads=N,..]
//! [--engines=NAME,..] [CASE]...`; a name selects the cases or engines that contain it. What the
//! ratios are to takes part in any case.

use millpond_rangelock::bench::{Options, cases, measure};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let quick = args.iter().any(|arg| arg == "--quick");
    let names: Vec<&String> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    let mut options = if quick { Options::quick() } else { Options::default() };
    if let Some(threads) = args.iter().find_map(|arg| arg.strip_prefix("--threads=")) {
        options.threads = threads.split(',').filter_map(|n| n.parse().ok()).collect();
    }
    let engines = args.iter().find_map(|arg| arg.strip_prefix("--engines="));
    println!(
        "{:<22} {:>7} {:<20} {:>12} {:>9} {:>9} {:>9}  ratio (q1..q3) to",
        "case", "threads", "engine", "pairs/s", "ns/pair", "cpu ns", "switches"
    );
    for mut case in cases(&options) {
        if !names.is_empty() && !names.iter().any(|name| case.name.contains(name.as_str())) {
            continue;
        }
        if let Some(wanted) = engines {
            let peer = case.peer;
            let is_wanted = |name: &str| wanted.split(',').any(|wanted| name.contains(wanted));
            case.engines.retain(|&engine| engine == peer || is_wanted(engine.name()));
        }
        for row in measure(&case, &options) {
            println!(
                "{:<22} {:>7} {:<20} {:>12.0} {:>9.1} {:>9.1} {:>9.5}  {:.2} ({:.2}..{:.2}) {}",
                row.case,
                row.threads,
                row.engine,
                row.ops_per_s,
                row.ns_per_op,
                row.cpu_ns_per_op,
                row.context_switches_per_op,
                row.ratio_median,
                row.ratio_q1,
                row.ratio_q3,
                row.ratio_to,
            );
        }
    }
}
