//! A file with a position, for code that uses `Read`, `Write` and `Seek`.

use std::borrow::Borrow;
use std::io::{self, Read, Seek, SeekFrom, Write};

use crate::api::file::File;

/// A [`File`] with a position of its own, as `Read`, `Write` and `Seek` need it.
///
/// `F` is a `File`, or a reference or [`Arc`](std::sync::Arc) of one, so several cursors may use one file. Nothing is
/// buffered beside the file's cache; [`std::io::BufReader`] and [`std::io::BufWriter`] save calls for small pieces.
///
/// # Examples
///
/// ```
/// use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
///
/// use millpond::file::Cursor;
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// let file = engine.open(&path, &OpenOptions::new().read(true).write(true).create(true))?;
/// let mut cursor = Cursor::new(&file);
/// writeln!(cursor, "a pond").unwrap();
/// writeln!(cursor, "a mill").unwrap();
/// assert_eq!(cursor.position(), 14);
/// cursor.set_position(2);
/// let lines: Vec<String> = BufReader::new(&mut cursor).lines().map(Result::unwrap).collect();
/// assert_eq!(lines, ["pond", "a mill"]);
/// cursor.seek(SeekFrom::End(-5)).unwrap();
/// let mut rest = String::new();
/// cursor.read_to_string(&mut rest).unwrap();
/// assert_eq!(rest, "mill\n");
/// assert_eq!(cursor.get_ref().len()?, 14);
/// cursor.into_inner();
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Cursor<F> {
    file: F,
    position: u64,
}

impl<F: Borrow<File>> Cursor<F> {
    /// A cursor at the start of the file.
    pub fn new(file: F) -> Cursor<F> {
        Cursor { file, position: 0 }
    }

    /// The offset of the next byte that is read or written.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Changes the position, to one in the file or beyond its end.
    pub fn set_position(&mut self, position: u64) {
        self.position = position;
    }

    /// The file.
    #[must_use]
    pub fn get_ref(&self) -> &File {
        self.file.borrow()
    }

    /// Ends the cursor; returns the file.
    pub fn into_inner(self) -> F {
        self.file
    }

    fn advance(&mut self, moved: usize) -> usize {
        self.position += moved as u64;
        moved
    }
}

impl<F: Borrow<File>> Read for Cursor<F> {
    fn read(&mut self, dst: &mut [u8]) -> io::Result<usize> {
        let moved = self.get_ref().read_at(dst, self.position)?;
        Ok(self.advance(moved))
    }

    fn read_vectored(&mut self, dst: &mut [io::IoSliceMut<'_>]) -> io::Result<usize> {
        let moved = self.get_ref().read_vectored_at(dst, self.position)?;
        Ok(self.advance(moved))
    }
}

impl<F: Borrow<File>> Write for Cursor<F> {
    fn write(&mut self, src: &[u8]) -> io::Result<usize> {
        let moved = self.get_ref().write_at(src, self.position)?;
        Ok(self.advance(moved))
    }

    fn write_vectored(&mut self, src: &[io::IoSlice<'_>]) -> io::Result<usize> {
        let moved = self.get_ref().write_vectored_at(src, self.position)?;
        Ok(self.advance(moved))
    }

    /// Has no effect: nothing is buffered here. [`File::sync_data`] makes writes durable.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<F: Borrow<File>> Seek for Cursor<F> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.position = position_after(self.get_ref(), self.position, to)?;
        Ok(self.position)
    }
}

/// The position after a seek from `position`.
pub(crate) fn position_after(file: &File, position: u64, to: SeekFrom) -> io::Result<u64> {
    let after = match to {
        SeekFrom::Start(offset) => Some(offset),
        SeekFrom::Current(by) => position.checked_add_signed(by),
        SeekFrom::End(by) => file.len()?.checked_add_signed(by),
    };
    Ok(after.ok_or(io::ErrorKind::InvalidInput)?)
}
