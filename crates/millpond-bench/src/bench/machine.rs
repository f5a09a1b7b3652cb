//! The machine of a report: results of two machines are not comparable.

use std::fs;
use std::path::Path;
use std::thread;

use millpond_bench_peers::{file_system_name, processor_name, value_of};
use serde::{Deserialize, Serialize};

use super::outcome::{Name, word};

/// The machine and the directory, as the JSON report has them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    #[serde(deserialize_with = "word")]
    pub millpond: Name,
    /// Results of an unoptimized build mean nothing.
    pub optimized: bool,
    pub cpu: String,
    pub cores: usize,
    pub memory_bytes: u64,
    pub kernel: String,
    #[serde(deserialize_with = "word")]
    pub architecture: Name,
    /// The kernel's setting: `madvise` or `always` lets frames be huge pages.
    pub huge_pages: String,
    pub file_system: String,
}

impl Machine {
    pub fn of(dir: &Path) -> Self {
        Self {
            millpond: env!("CARGO_PKG_VERSION"),
            optimized: !cfg!(debug_assertions),
            cpu: processor_name(),
            cores: thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory_bytes(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            architecture: std::env::consts::ARCH,
            huge_pages: huge_pages(),
            file_system: file_system_name(dir),
        }
    }

    /// Name and value of each property, for display.
    pub fn properties(&self) -> [(&'static str, String); 7] {
        let build = if self.optimized { "" } else { ", NOT OPTIMIZED: these figures mean nothing" };
        [
            ("millpond", format!("{}{build}", self.millpond)),
            ("processor", format!("{} ({}), {} cores", self.cpu, self.architecture, self.cores)),
            ("memory", format!("{:.1} GiB", self.memory_bytes as f64 / (1_u64 << 30) as f64)),
            ("kernel", self.kernel.clone()),
            ("huge pages", self.huge_pages.clone()),
            ("file system", self.file_system.clone()),
            ("rounds", "A B B A; medians of the rounds' ratios, with quartiles".into()),
        ]
    }
}

fn memory_bytes() -> u64 {
    let text = value_of("/proc/meminfo", &["MemTotal"]);
    let kib: Option<u64> = text.split_whitespace().next().and_then(|kib| kib.parse().ok());
    kib.unwrap_or(0) << 10
}

/// The word in brackets is the one that holds: `always [madvise] never`.
fn huge_pages() -> String {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = text.ok().and_then(|text| {
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    });
    chosen.unwrap_or_else(|| "unknown".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::of(Path::new("/"));
        assert!(machine.cores > 0 && machine.memory_bytes > 0, "{machine:?}");
        assert!(!machine.kernel.is_empty() && !machine.cpu.is_empty(), "{machine:?}");
    }
}
