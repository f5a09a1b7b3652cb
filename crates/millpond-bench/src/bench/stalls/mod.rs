//! The suite `stalls`: the longest time of one operation beside heavy work of other threads.
//!
//! - [`sync`]: a sync while threads overwrite the file as fast as they can.
//! - [`append`]: an append while threads extend the file as fast as they can.
//! - [`evict`]: a cached write while another thread has to evict a page, and none is cold.
//!
//! The longest operation counts, not the rate: rows have quantiles of the operations of all slices,
//! and notes have the longest one and its target. The first slice of each engine is not counted.

mod append;
mod evict;
mod operation_times;
mod sync;

use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::Result;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    sync::run(plan, &mut outcome)?;
    append::run(plan, &mut outcome)?;
    evict::run(plan, &mut outcome)?;
    Ok(outcome)
}
