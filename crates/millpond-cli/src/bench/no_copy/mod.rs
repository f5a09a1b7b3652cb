//! The suite `no-copy`: what a direct request costs, in the library alone and with a device.
//!
//! - [`null`]: the way to a back end that completes at once, by the number of segments, against the
//!   same with vectors that are copied for each request, and against io_uring requests that do
//!   nothing.
//! - [`device`]: the same requests to the disk, against fio.
//! - [`flow`]: what both have in common: requests that follow each other for a slice of time.

mod device;
mod flow;
mod null;

pub use self::flow::Flow;
pub use self::null::nop_slice;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::Result;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    null::run(plan, &mut outcome)?;
    device::run(plan, &mut outcome)?;
    Ok(outcome)
}
