//! Goal: `millpond check-untorn` names the sizes that a directory offers, or their requirements.

use std::path::Path;
use std::process::{Command, Output};

#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

fn check(dir: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
    let Output { status, stdout, stderr } = command.arg("check-untorn").arg(dir).output().unwrap();
    assert!(stderr.is_empty() || status.code() == Some(1), "{}", String::from_utf8_lossy(&stderr));
    assert!(std::fs::read_dir(dir).into_iter().flatten().next().is_none(), "it left a file");
    (status.code(), String::from_utf8(stdout).unwrap())
}

fn command(program: &str, args: &[&str]) -> Result<(), String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(args).env("PATH", path).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let said = || format!("{program}: {}", String::from_utf8_lossy(&output.stderr));
    output.status.success().then_some(()).ok_or_else(said)
}

#[test]
fn a_file_system_in_memory_offers_nothing() {
    let dir = match tempfile::tempdir_in("/dev/shm") {
        Ok(dir) => dir,
        Err(error) => return skip::skip(format_args!("/dev/shm: {error}")),
    };
    let (status, said) = check(dir.path());
    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains("may tear any block") && said.contains("mkfs.xfs"), "{said}");
    let (status, _) = check(&dir.path().join("missing"));
    assert_eq!(status, Some(1));
}

#[test]
fn xfs_on_a_loop_device_offers_all_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let (image, point) = (dir.path().join("image"), dir.path().join("mounted"));
    std::fs::File::create(&image).unwrap().set_len(320 << 20).unwrap();
    std::fs::create_dir(&point).unwrap();
    let (image, at) = (image.to_str().unwrap(), point.to_str().unwrap());
    let made = command("mkfs.xfs", &["-q", "-m", "reflink=1", image])
        .and_then(|()| command("mount", &["-o", "loop", image, at]));
    if let Err(reason) = made {
        return skip::skip(reason);
    }
    let (status, said) = check(&point);
    command("umount", &["--lazy", at]).unwrap();
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("no block of 4096 to 65536 bytes"), "{said}");
}
