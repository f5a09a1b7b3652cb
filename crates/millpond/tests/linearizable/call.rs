//! Runs one operation on the engine, and converts cells to bytes and back.

use std::io::{IoSlice, IoSliceMut};

use millpond::{Advice, Error, File};

use crate::history::{Op, Outcome, TORN, stamp};
use crate::plan::{How, Step};

/// Calls the engine. Bytes that a read returned are in `bytes`.
pub fn act(
    file: &File,
    step: &Step,
    cell_bytes: usize,
    bytes: &mut [u8],
) -> Result<Outcome, Error> {
    let offset = |at: usize| (at * cell_bytes) as u64;
    let cut = bytes.len() / 3;
    let wrote = |at: u64, bytes: usize| Outcome::Wrote { at: at as usize, bytes };
    let read = |bytes: usize| Outcome::Read { bytes, cells: Vec::new() };
    match (step.op, step.how) {
        (Op::Read { at, len, .. }, How::View) => {
            let view = file.view(offset(at), len * cell_bytes)?;
            // A view is a snapshot, so its bytes may be read later.
            if step.spins.is_multiple_of(2) {
                std::thread::yield_now();
            }
            let moved = view.len();
            bytes[..moved].copy_from_slice(&view);
            Ok(read(moved))
        }
        (Op::Read { at, .. }, How::Vectored) => {
            let (head, tail) = bytes.split_at_mut(cut);
            let mut slices = [IoSliceMut::new(head), IoSliceMut::new(tail)];
            file.read_vectored_at(&mut slices, offset(at)).map(read)
        }
        (Op::Read { at, .. }, _) => file.read_at(bytes, offset(at)).map(read),
        (Op::Write { at, .. }, How::Vectored) => {
            let slices = [IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])];
            file.write_vectored_at(&slices, offset(at)).map(|moved| wrote(offset(at), moved))
        }
        (Op::Write { at, .. }, How::Dsync) => {
            file.write_at_dsync(bytes, offset(at)).map(|moved| wrote(offset(at), moved))
        }
        (Op::Write { at, .. }, _) => {
            file.write_at(bytes, offset(at)).map(|moved| wrote(offset(at), moved))
        }
        (Op::Append { .. }, how) => {
            let cut = if how == How::Vectored { cut } else { 0 };
            let slices = [IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])];
            match file.append_vectored(&slices) {
                Err(Error::Io { offset, len, ref source, .. })
                    if source.kind() == std::io::ErrorKind::WriteZero =>
                {
                    Ok(wrote(offset, len as usize))
                }
                outcome => outcome.map(|at| wrote(at, bytes.len())),
            }
        }
        (Op::Truncate { len }, _) => file.truncate(offset(len)).map(|()| Outcome::Done),
        (Op::Clear { at, len }, How::Zero) => {
            file.zero_range(offset(at), offset(len)).map(|()| Outcome::Done)
        }
        (Op::Clear { at, len }, _) => {
            file.punch_hole(offset(at), offset(len)).map(|()| Outcome::Done)
        }
        (Op::Allocate { at, len }, _) => {
            file.allocate(offset(at), offset(len)).map(|()| Outcome::Done)
        }
        (Op::Len, _) => file.len().map(|len| Outcome::Len(len as usize)),
        (Op::Nothing | Op::Adopt, how) => match how {
            How::WriteBack => file.write_back(),
            How::Sync => file.sync_data(),
            How::DontNeed => file.advise(0, 0, Advice::DontNeed),
            How::WillNeed => file.advise(0, 0, Advice::WillNeed),
            _ => file.invalidate(0, 1 << 20),
        }
        .map(|()| Outcome::Done),
    }
}

/// The bytes of cells that hold parts of what operation `value` writes.
pub fn content(value: u8, len: usize, cell_bytes: usize) -> Vec<u8> {
    (0..len).map(|part| cell(stamp(value, part), cell_bytes)).collect::<Vec<_>>().concat()
}

/// The cells that bytes contain. The last one may be partial, and is left out if only one byte is
/// there.
pub fn cells_of(bytes: &[u8], cell_bytes: usize) -> Vec<u16> {
    let whole = bytes.chunks(cell_bytes).filter(|bytes| bytes.len() > 1);
    let one = |bytes: &[u8]| {
        let first = u16::from_le_bytes([bytes[0], bytes[1]]);
        if *bytes == cell(first, bytes.len()) { first } else { TORN }
    };
    whole.map(one).collect()
}

/// A cell's bytes.
fn cell(content: u16, cell_bytes: usize) -> Vec<u8> {
    let mut bytes = content.to_le_bytes().repeat(cell_bytes.div_ceil(2));
    bytes.truncate(cell_bytes);
    bytes
}
