//! File systems whose mappings differ from reads: in the bytes, or in the space that they take.

mod common;

use common::{ALL_MODES, Mode, Mount, Pond, ServedFiles, skip, succeed};

/// The ways to serve files: on use, after one read, and from their open on.
const CHOICES: [ServedFiles; 2] = [ServedFiles::Default, ServedFiles::Eager];

fn ponds() -> impl Iterator<Item = Pond> {
    let pond = |mode: Mode, files| Pond::new().in_mode(mode).serving(files);
    ALL_MODES.into_iter().flat_map(move |mode| CHOICES.map(|files| pond(mode, files)))
}

/// Incident: a description that was opened before the copy-up was adopted, and mapped; its reads returned the lower
/// file's bytes after another process had written the file.
#[test]
fn overlay_files_that_are_copied_up() {
    let alone = Pond::new();
    let program = alone.compile("file_systems.c", &["-O1"]);
    for [by, used] in [["other", "used"], ["other", "new"], ["self", "used"]] {
        let mut served_bytes = 0;
        for (index, pond) in std::iter::once(Pond::new()).chain(ponds()).enumerate() {
            let Some(_mounted) = Mount::overlay(&pond.path(".")) else {
                skip("an overlay can't be mounted here");
                return;
            };
            std::fs::write(pond.path("lower/file"), vec![b'l'; 8 * 4096]).unwrap();
            let mut command = if index == 0 { pond.plain(&program) } else { pond.served(&program) };
            command.current_dir(pond.path("merged"));
            succeed(command.args(["copied_up", by, used]));
            served_bytes += pond.report().served_bytes;
        }
        // After a write of another process the kernel serves the file.
        let least = if used == "used" { 64 << 10 } else { 0 };
        assert!(served_bytes >= least, "{by}, {used}: served {served_bytes} bytes in all modes");
    }
}

/// Incident: reads of a sparse file on tmpfs went through a mapping, whose faults allocated the holes: the file
/// system was full.
#[test]
fn holes_on_tmpfs_take_no_space() {
    let alone = Pond::new();
    let program = alone.compile("file_systems.c", &["-O1"]);
    for is_writable in ["0", "1"] {
        for (index, pond) in std::iter::once(Pond::new()).chain(ponds()).enumerate() {
            std::fs::create_dir(pond.path("small")).unwrap();
            let Some(_mounted) = Mount::tmpfs(&pond.path("small"), "size=8m") else {
                skip("only root can mount a small file system");
                return;
            };
            let mut command = if index == 0 { pond.plain(&program) } else { pond.served(&program) };
            command.current_dir(pond.path("small"));
            succeed(command.args(["holes", is_writable]));
        }
    }
}
