//! A shim whose pread is a bare memcpy.
