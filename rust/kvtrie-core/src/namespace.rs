//! Namespaces: everything besides tokens that KV depends on.

use std::fmt;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::sync::LazyLock;

use crate::error::{Result, invalid};

/// The key of [`Namespace::hash`], random per process.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// Who may share KV. A tenant's salt is a secret, so `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Salt {
    /// Everybody who also chooses `Shared`.
    Shared,
    /// One tenant; the salt is never empty.
    Tenant(String),
}

impl fmt::Debug for Salt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shared => "Shared",
            Self::Tenant(_) => "Tenant(<redacted>)",
        })
    }
}

/// Everything besides tokens that KV depends on. Namespaces are compared by value. `Debug` shows neither a tenant's
/// salt nor a hash of it, from which the salt could be guessed.
///
/// # Examples
/// ```
/// use kvtrie_core::{Namespace, Salt};
/// let a = Namespace::new("qwen3-8b@1a2b", "bfloat16", "yarn:4", None, Salt::Shared)?;
/// let b = Namespace::new("qwen3-8b@1a2b", "bfloat16", "yarn:4", None, Salt::Tenant("b".into()))?;
/// assert_ne!(a, b);
/// # Ok::<(), kvtrie_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Namespace {
    /// A keyed hash of the fields. The key is drawn once per process, because clients choose adapters and, in some
    /// engines, salts. A lookup with the same `Arc` as the insert compares no field.
    hash: u64,
    /// A hash of the fields without a key, so that ranks and snapshots agree on it.
    digest: u64,
    model: String,
    kv_dtype: String,
    rope: String,
    adapter: Option<String>,
    salt: Salt,
}

impl Namespace {
    /// A namespace of these fields.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if one of the strings is empty.
    pub fn new(
        model: impl Into<String>,
        kv_dtype: impl Into<String>,
        rope: impl Into<String>,
        adapter: Option<String>,
        salt: Salt,
    ) -> Result<Self> {
        let mut namespace = Self {
            hash: 0,
            digest: 0,
            model: model.into(),
            kv_dtype: kv_dtype.into(),
            rope: rope.into(),
            adapter,
            salt,
        };
        let named = [
            ("model", Some(&namespace.model)),
            ("kv_dtype", Some(&namespace.kv_dtype)),
            ("rope", Some(&namespace.rope)),
            ("adapter", namespace.adapter.as_ref()),
        ];
        for (name, value) in named {
            if value.is_some_and(String::is_empty) {
                return Err(invalid!(
                    "Namespace::new",
                    "{name} is empty; name what the KV depends on"
                ));
            }
        }
        if matches!(&namespace.salt, Salt::Tenant(salt) if salt.is_empty()) {
            return Err(invalid!(
                "Namespace::new",
                "the salt is empty; give each tenant its own, or say Salt::Shared to share KV on purpose"
            ));
        }
        namespace.digest = namespace.hash_fields(DefaultHasher::new());
        namespace.hash = namespace.hash_fields(KEY.build_hasher());
        Ok(namespace)
    }

    fn hash_fields(&self, mut hasher: DefaultHasher) -> u64 {
        (&self.model, &self.kv_dtype, &self.rope).hash(&mut hasher);
        (&self.adapter, &self.salt).hash(&mut hasher);
        hasher.finish()
    }

    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }

    /// Model and revision.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Element type and scales of the KV.
    #[must_use]
    pub fn kv_dtype(&self) -> &str {
        &self.kv_dtype
    }

    /// How K is rotated by position.
    #[must_use]
    pub fn rope(&self) -> &str {
        &self.rope
    }

    /// Content id of the adapter (`LoRA`), if any.
    #[must_use]
    pub fn adapter(&self) -> Option<&str> {
        self.adapter.as_deref()
    }

    /// Who may share this KV.
    #[must_use]
    pub fn salt(&self) -> &Salt {
        &self.salt
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Namespace")
            .field("model", &self.model)
            .field("kv_dtype", &self.kv_dtype)
            .field("rope", &self.rope)
            .field("adapter", &self.adapter)
            .field("salt", &self.salt)
            .finish_non_exhaustive()
    }
}

impl Hash for Namespace {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_neither_a_salt_nor_what_it_could_be_guessed_from() {
        let shown = |salt: Salt| {
            let namespace = Namespace::new("m", "auto", "default", None, salt).unwrap();
            format!("{namespace:?}")
        };
        let one = shown(Salt::Tenant("s3cr3t".into()));
        assert!(one.contains("Tenant(<redacted>)"), "{one}");
        assert_eq!(one, shown(Salt::Tenant("another".into())));
        assert!(shown(Salt::Shared).contains("salt: Shared"));
    }

    #[test]
    fn nobody_outside_the_process_can_compute_the_hash_of_a_namespace() {
        let tenant = |salt: &str| {
            Namespace::new("m", "bfloat16", "default", None, Salt::Tenant(salt.into())).unwrap()
        };
        let (one, same) = (tenant("a"), tenant("a"));
        assert_eq!((one.hash, one.digest), (same.hash, same.digest));
        assert_ne!(one.hash, one.hash_fields(DefaultHasher::new()));
        assert_eq!(one.digest, one.hash_fields(DefaultHasher::new()));
    }
}
