//! Tests of the whole engine that need to look inside it.

mod no_shared_write;
