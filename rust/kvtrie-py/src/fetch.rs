//! Asks the processor for memory before it is read, so that nobody waits for it then.

/// Begins to fetch the line of memory at an address. It is a hint: where there is no instruction for it, nothing is done.
pub(crate) fn fetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: This instruction reads no value and never faults, whatever the address is.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
