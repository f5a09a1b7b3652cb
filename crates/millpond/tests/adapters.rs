//! What code that knows files of `std` uses: descriptors, `FileExt`, `Read`, `Write` and `Seek`; and guards that suspend
//! write-back.

mod common;

use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use millpond::file::Cursor;
use millpond::{Backing, OpenOptions, WriteMode};

use common::{back_ends, engine, read_write, temp_dir};

/// Goal: each handle has a descriptor of its file, on each back end and with each access.
#[test]
fn each_handle_has_a_descriptor_of_its_file() {
    for (name, back_end) in back_ends(1) {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, "pond").unwrap();
        let inode = std::fs::metadata(&path).unwrap().ino();
        let engine = engine(1 << 20, back_end);
        let (read, write) = (OpenOptions::new().read(true), OpenOptions::new().write(true));
        // Back ends without files read the file once, by the first descriptor.
        let is_real = ["threads", "uring"].contains(&name);
        let first = engine.open(&path, if is_real { &write } else { &read }).unwrap();
        let handles =
            [&read, &write, &read_write()].map(|options| engine.open(&path, options).unwrap());
        for file in handles.iter().chain([&first]) {
            assert_eq!(rustix::fs::fstat(file.as_fd()).unwrap().st_ino, inode);
        }
        drop(first);
        for file in &handles {
            assert_eq!(rustix::fs::fstat(file.as_fd()).unwrap().st_ino, inode);
        }
    }
}

fn copy(from: &dyn FileExt, to: &dyn FileExt, len: usize) -> std::io::Result<()> {
    let mut bytes = vec![0; len];
    from.read_exact_at(&mut bytes, 1)?;
    to.write_all_at(&bytes, 2)
}

/// Goal: code that is generic over `FileExt` moves the bytes of a `File`, and gets its errors.
#[test]
fn generic_code_reads_and_writes() {
    let dir = temp_dir();
    let engine = engine(1 << 20, millpond::BackendChoice::Threads);
    let open = |name| engine.open(dir.path().join(name), &read_write().create(true)).unwrap();
    let (from, to) = (open("from"), open("to"));
    from.write_all_at(b"a pond", 0).unwrap();
    copy(&from, &to, 5).unwrap();
    assert_eq!(std::fs::read(dir.path().join("to")).unwrap(), b"\0\0 pond");
    assert_eq!(copy(&from, &to, 6).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

/// Goal: cursors of one file have positions of their own; a seek moves one of them.
#[test]
fn cursors_have_positions_of_their_own() {
    let dir = temp_dir();
    let engine = engine(1 << 20, millpond::BackendChoice::Threads);
    let file = Arc::new(engine.open(dir.path().join("file"), &read_write().create(true)).unwrap());
    let (mut writer, mut reader) = (Cursor::new(Arc::clone(&file)), Cursor::new(&*file));
    let content: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
    writer.write_all(&content).unwrap();
    let mut bytes = Vec::new();
    assert_eq!(reader.read_to_end(&mut bytes).unwrap(), content.len());
    assert!(bytes == content);
    assert_eq!(reader.seek(SeekFrom::End(-10)).unwrap(), 99_990);
    assert_eq!(reader.seek(SeekFrom::Current(-90)).unwrap(), 99_900);
    let mut ten = [0; 10];
    reader.read_exact(&mut ten).unwrap();
    assert_eq!((&ten[..], reader.position()), (&content[99_900..99_910], 99_910));
    assert_eq!(
        reader.seek(SeekFrom::Current(-100_000)).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    assert_eq!(reader.position(), 99_910, "a seek that fails moves nothing");
    assert_eq!(writer.position(), 100_000);
    reader.set_position(1 << 20);
    assert_eq!(reader.read(&mut ten).unwrap(), 0);
}

/// Goal: writes go through while a guard lives, also if guards overlap, and wait again after the last.
#[test]
fn guards_suspend_writeback() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(1 << 20, millpond::BackendChoice::Threads);
    let options = read_write().create(true).backing(Backing::DirectInPlace);
    let file = engine.open(&path, &options.write_mode(WriteMode::Back)).unwrap();
    let is_below = |value: u8| {
        file.write_all_at(&[value; 4096], 0).unwrap();
        std::fs::read(&path).unwrap().first() == Some(&value)
    };
    assert!(!is_below(1), "writes wait");
    let first = file.suspend_writeback().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), [1; 4096], "dirty pages are written back");
    let second = file.suspend_writeback().unwrap();
    drop(file.suspend_direct());
    drop(first);
    assert!(is_below(2), "the second guard lives");
    drop(second);
    assert!(!is_below(3), "writes wait again");
}

/// Goal: tokio's traits move the bytes of the file, from a cold cache and a warm one; a refused write is
/// reported by the flush at the latest, a read of a handle for direct I/O at once.
#[cfg(not(any(loom, scheduled)))]
#[test]
fn tokio_reads_writes_and_seeks() {
    use millpond::AsyncFile;
    use millpond::file::AsyncCursor;
    use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};

    let dir = temp_dir();
    let engine = engine(1 << 20, millpond::BackendChoice::Threads);
    let content: Vec<u8> = (0..3 << 20).map(|at: u32| (at % 251) as u8).collect();
    let open = |options: &OpenOptions| engine.open(dir.path().join("file"), options);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        let file = AsyncFile::from(open(&read_write().create(true)).unwrap());
        let mut cursor = AsyncCursor::new(file.clone());
        cursor.write_all(&content).await.unwrap();
        cursor.flush().await.unwrap();
        assert!(std::fs::read(dir.path().join("file")).unwrap() == content);
        for _ in 0..2 {
            let mut bytes = Vec::new();
            AsyncCursor::new(file.clone()).read_to_end(&mut bytes).await.unwrap();
            assert!(bytes == content);
        }
        assert_eq!(cursor.seek(SeekFrom::End(-5)).await.unwrap(), content.len() as u64 - 5);
        let mut five = [0; 5];
        cursor.read_exact(&mut five).await.unwrap();
        assert_eq!(five, content[content.len() - 5..]);
        cursor.seek(SeekFrom::Current(-6)).await.unwrap();
        cursor.seek(SeekFrom::Current(-(4 << 20))).await.unwrap_err();
        assert_eq!(cursor.read_u8().await.unwrap(), content[content.len() - 6]);

        let reader = AsyncFile::from(open(&OpenOptions::new().read(true)).unwrap());
        let mut refused = AsyncCursor::new(reader);
        let written = refused.write_all(&[1]).await;
        assert!(written.and(refused.flush().await).is_err());
        match open(&OpenOptions::new().read(true).direct(true).bounce(true)) {
            Err(error) => common::skip(format_args!("direct I/O: {error}")),
            Ok(direct) => {
                let error = AsyncCursor::new(AsyncFile::from(direct)).read_u8().await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
            }
        }
    });
}
