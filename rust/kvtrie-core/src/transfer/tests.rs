//! Manifests and plans of transfers.
