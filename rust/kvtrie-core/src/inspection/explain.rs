//! Explains why the exact match of a prompt ended where it did.

use std::cmp::Reverse;
use std::fmt;

use crate::effort::Effort;
use crate::error::Result;
use crate::ids::{Depth, NO_NODE, NodeIndex, depth};
use crate::index::RadixIndex;
use crate::namespace::Namespace;
use crate::plan::{Class, PlanOptions};
use crate::policy::{ReusePolicy, Scope};
use crate::session::SessionId;
use crate::storage::forest::Position;
use crate::storage::gone::Note;
use crate::storage::node::Node;
use crate::tokens::TokenSequence;

/// The most other namespaces that are searched.
const MOST_OTHERS: usize = 64;

/// Why an exact match ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Every whole block of the prompt is cached exactly.
    Complete,
    /// Other tokens are cached there.
    Diverged,
    /// The tokens of the prompt were cached there, after the same prefix, and left.
    Evicted,
    /// Nothing is known about these tokens there: they were never cached, or are forgotten.
    NotCached,
    /// The same tokens are cached there, but their KV is approximate.
    ApproximateOnly,
    /// The same tokens are cached there, but their KV is approximate and was built under a policy that is not as strict
    /// as the one asked about.
    LaxerPolicy,
    /// More of the prompt is cached under another namespace of the same salt.
    OtherNamespace,
}

impl Reason {
    /// The reason for programs, in snake case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Diverged => "diverged",
            Self::Evicted => "evicted",
            Self::NotCached => "not_cached",
            Self::ApproximateOnly => "approximate_only",
            Self::LaxerPolicy => "laxer_policy",
            Self::OtherNamespace => "other_namespace",
        }
    }
}

/// Options of [`RadixIndex::explain`].
#[derive(Clone, Debug, PartialEq)]
pub struct ExplainOptions {
    /// The policy of the plan whose savings are reported.
    pub policy: ReusePolicy,
    /// Tokens shown before and after the position.
    pub context: usize,
    /// Tokens at the end that the plan always computes.
    pub keep_last: usize,
    /// The conversation that the prompt belongs to, as in [`PlanOptions`].
    pub session: Option<SessionId>,
    /// Where the last message begins, as in [`PlanOptions`].
    pub moved_end: Option<usize>,
}

impl Default for ExplainOptions {
    fn default() -> Self {
        Self {
            policy: ReusePolicy {
                approximate: true,
                ..ReusePolicy::EXACT_ONLY
            },
            context: 8,
            keep_last: 1,
            session: None,
            moved_end: None,
        }
    }
}

/// Token ids around the position, in the prompt and in the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// Position of the first id of both lists.
    pub start: usize,
    /// Token ids of the prompt.
    pub ours: Vec<u32>,
    /// Cached token ids. The list ends where the cache ends or continues in several ways.
    pub theirs: Vec<u32>,
}

/// Another namespace of the same salt with more of the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceDifference {
    /// Names of the fields that differ.
    pub fields: Vec<&'static str>,
    /// Tokens of the prompt that match exactly there.
    pub num_tokens: usize,
}

/// What a plan would reuse and compute, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WouldSave {
    /// Reused exactly.
    pub exact: usize,
    /// Reused from another context or position.
    pub approximate: usize,
    /// To be computed.
    pub compute: usize,
    /// Tokens to be computed that are out of scope: a plan with [`Scope::Namespace`] would reuse them approximately.
    pub out_of_scope: usize,
}

/// A group besides group 0 that lets the prompt continue before the end of its exact match only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupCut {
    /// The name of the group that cut last.
    pub group: String,
    /// Tokens after which every group can continue.
    pub num_tokens: usize,
}

/// Why an exact match ended where it did. `to_string` gives it in English.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The reason.
    pub reason: Reason,
    /// The first token of the prompt that does not match. If no other tokens are cached there, the first token of its
    /// block.
    pub position: usize,
    /// Tokens that match exactly, in whole blocks.
    pub num_exact: usize,
    /// Tokens of the prompt.
    pub num_tokens: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Token ids around the position.
    pub context: Context,
    /// Kinds of the cached token at the position.
    pub kinds: Vec<String>,
    /// Kinds of the cached token before it.
    pub kinds_before: Vec<String>,
    /// Another namespace with more of the prompt.
    pub other_namespace: Option<NamespaceDifference>,
    /// Fields in which the policy that the KV was built under is laxer. Empty unless the reason is
    /// [`Reason::LaxerPolicy`].
    pub laxer_in: Vec<&'static str>,
    /// What a plan would find; if the index has a group with states, in place alone.
    pub would_save: WouldSave,
    /// The group that keeps the prompt from using all of the match, if there is one. None where the plan has moved runs:
    /// windows are then copied or rebuilt, and cut nothing (G9).
    pub cut_by: Option<GroupCut>,
}

/// The cached block at the place of the prompt's first unmatched block, and how many tokens the two share.
#[derive(Clone, Copy)]
struct Neighbour {
    node: NodeIndex,
    shared: usize,
}

impl RadixIndex {
    /// Explains why the exact match of `seq` ends where it does, and what a plan would reuse. It touches and pins
    /// nothing and does not advance the clock.
    ///
    /// [`Reason::Evicted`] is known for holes, and for the latest 4,096 departures while the prefix before them is
    /// cached. It is wrong only if 64-bit digests collide. Tokens whose departure is forgotten, or that were dropped
    /// with their namespace, give [`Reason::NotCached`], or [`Reason::Diverged`] if other tokens are there.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    ///
    /// # Complexity
    /// A plan without pins, and lookups in at most 64 namespaces of the salt: the nearest in the order of their fields,
    /// half of them before the prompt's own.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns.clone(), vec![1, 2, 3, 4], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// let mut prompt = TokenSequence::new(ns, vec![1, 2, 3, 9, 9], vec![])?;
    /// let why = index.explain(&mut prompt, &ExplainOptions::default())?;
    /// assert_eq!((why.reason, why.position, why.num_exact), (Reason::Diverged, 3, 2));
    /// assert_eq!((why.context.ours, why.context.theirs), (vec![1, 2, 3, 9, 9], vec![1, 2, 3, 4]));
    /// index.evict(1);
    /// assert_eq!(index.explain(&mut seq, &ExplainOptions::default())?.reason, Reason::Evicted);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn explain(
        &mut self,
        seq: &mut TokenSequence,
        options: &ExplainOptions,
    ) -> Result<Explanation> {
        options
            .policy
            .check(self.config().min_run, "RadixIndex::explain")?;
        let plan = PlanOptions {
            keep_last: options.keep_last,
            pin: false,
            session: options.session,
            moved_end: options.moved_end,
        };
        plan.check(seq.len(), "RadixIndex::explain")?;
        let would_save = self.would_save(seq, &options.policy, plan);
        let at = self.exact_prefix(seq, 0, Effort::ANY);
        let at = at.filter(|at| at.node != NO_NODE);
        let rebuilds = would_save.approximate > 0 && self.may_rebuild(&options.policy);
        let cut_by = at.filter(|_| !rebuilds).and_then(|at| self.cut_of(at));
        let block_size = self.forest().block_size();
        let reached = at.map_or(0, |at| at.depth);
        let num_exact = reached as usize * block_size;
        let is_complete = num_exact + block_size > seq.len();
        let neighbour = at
            .filter(|_| !is_complete)
            .and_then(|at| self.neighbour(seq, at));
        let other_namespace = (!is_complete)
            .then(|| self.other_namespace(seq, reached))
            .flatten();
        let reason = if is_complete {
            Reason::Complete
        } else if let Some(reason) = self.known_reason(seq, at, neighbour) {
            reason
        } else if other_namespace.is_some() {
            Reason::OtherNamespace
        } else if neighbour.is_some() {
            Reason::Diverged
        } else {
            Reason::NotCached
        };
        let laxer_in = neighbour
            .filter(|_| reason == Reason::ApproximateOnly && options.policy.approximate)
            .map_or(Vec::new(), |neighbour| {
                let node = self.forest().node(neighbour.node);
                let label = node.payload(reached, block_size).label;
                let built = self.forest().grade(neighbour.node, label);
                built.laxer_in(&self.grade_of(&options.policy))
            });
        let reason = if laxer_in.is_empty() {
            reason
        } else {
            Reason::LaxerPolicy
        };
        let shared = neighbour.filter(|_| reason == Reason::Diverged);
        let position = num_exact + shared.map_or(0, |neighbour| neighbour.shared);
        let kinds = |token: usize| {
            let end = match (at, neighbour) {
                (_, Some(Neighbour { node, .. })) => {
                    Position::at(node, self.forest().node(node).end())
                }
                (Some(at), None) => at,
                (None, None) => return Vec::new(),
            };
            self.kind_names(self.tagging().on_path(self.forest(), end, token, token + 1))
        };
        Ok(Explanation {
            reason,
            position,
            num_exact,
            num_tokens: seq.len(),
            block_size,
            context: self.context(seq, position, neighbour, options.context),
            kinds: neighbour.map_or(Vec::new(), |_| kinds(position)),
            kinds_before: position.checked_sub(1).map_or(Vec::new(), kinds),
            other_namespace,
            laxer_in,
            would_save,
            cut_by,
        })
    }

    fn cut_of(&self, at: Position) -> Option<GroupCut> {
        let mut steps = Effort::ANY.steps();
        let hit = self.groups().deepest(self.forest(), at, &mut steps)?;
        let group = self.config().groups.get(hit.cut_by?.checked_sub(1)?)?;
        Some(GroupCut {
            group: group.name.clone(),
            num_tokens: hit.end.depth as usize * self.block_size(),
        })
    }

    fn would_save(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        plan: PlanOptions,
    ) -> WouldSave {
        let mut save = self.would_save_in(seq, policy, plan);
        if policy.approximate && policy.scope == Scope::Conversation {
            let everywhere = ReusePolicy {
                scope: Scope::Namespace,
                ..policy.clone()
            };
            let more = self.would_save_in(seq, &everywhere, plan);
            save.out_of_scope = save.compute.saturating_sub(more.compute);
        }
        save
    }

    fn would_save_in(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        plan: PlanOptions,
    ) -> WouldSave {
        let asked = (policy, &self.grade_of(policy));
        let draft = self.draft(seq, None, asked, plan, Effort::ANY);
        let segments = draft.unwrap_or_default().segments;
        let tokens = |class| {
            let of_class = segments.iter().filter(|segment| segment.class == class);
            of_class.map(|segment| segment.end - segment.start).sum()
        };
        WouldSave {
            exact: tokens(Class::Exact),
            approximate: tokens(Class::Approximate),
            compute: tokens(Class::Compute),
            out_of_scope: 0,
        }
    }

    /// Finds that block. Of several, the one that shares most tokens, then an exact one, then the first in token order.
    fn neighbour(&self, seq: &TokenSequence, at: Position) -> Option<Neighbour> {
        let block_size = self.forest().block_size();
        let start = at.depth as usize * block_size;
        let wanted = seq.view().slice(start, start + block_size);
        let edge = self.forest().node(at.node);
        if at.depth < edge.end() {
            let here = edge.view(block_size).slice(start, start + block_size);
            return Some(Neighbour {
                node: at.node,
                shared: wanted.common(here),
            });
        }
        let most_similar = |exact| {
            let mut found = self.forest().most_similar_children(at.node, exact, wanted);
            found.next()
        };
        let exact = self
            .forest()
            .nearest_child(at.node, wanted)
            .or_else(|| most_similar(true));
        let found = match (exact, most_similar(false)) {
            (Some(exact), Some(other)) if other.1 > exact.1 => other,
            (Some(exact), _) => exact,
            (None, other) => other?,
        };
        Some(Neighbour {
            node: found.0,
            shared: found.1,
        })
    }

    fn known_reason(
        &self,
        seq: &TokenSequence,
        at: Option<Position>,
        neighbour: Option<Neighbour>,
    ) -> Option<Reason> {
        let block_size = self.forest().block_size();
        let reached: Depth = at.map_or(0, |at| at.depth);
        if let Some(neighbour) = neighbour.filter(|neighbour| neighbour.shared == block_size) {
            let payload = self
                .forest()
                .node(neighbour.node)
                .payload(reached, block_size);
            return Some(if payload.is_present() {
                Reason::ApproximateOnly
            } else {
                Reason::Evicted
            });
        }
        let start = reached as usize * block_size;
        let block = seq.view().slice(start, start + block_size);
        let before = at.filter(|at| at.depth > 0);
        let prefix = before.map_or(seq.namespace().digest(), |_| 0);
        let note = Note::new(
            before.map(|at| self.forest().handle(at.node)),
            reached,
            self.gone().of_prompt(prefix, block),
        );
        self.gone().contains(note).then_some(Reason::Evicted)
    }

    /// Finds the namespace of the same salt in which most of `seq` matches exactly, if that is more than `reached`
    /// blocks. Of several, the one with the fewest differing fields, then the first by its fields.
    fn other_namespace(&self, seq: &TokenSequence, reached: Depth) -> Option<NamespaceDifference> {
        let own = seq.namespace();
        let block_size = self.forest().block_size();
        let limit = depth(seq.len() / block_size);
        let exact = |node: &Node, from, to| node.exact_until(from, to, block_size);
        let others = self.forest().trees().near(own, MOST_OTHERS / 2);
        let found = others.filter_map(|namespace| {
            let root = self.forest().root(namespace)?;
            let walked =
                self.forest()
                    .walk(seq.view(), root, limit, Effort::ANY, exact, |_, _, _| ());
            let depth = walked.at.depth;
            (depth > reached).then(|| (depth, differing(own, namespace), namespace))
        });
        let (depth, fields, _) = found.min_by_key(|(depth, fields, namespace)| {
            let named = (namespace.model(), namespace.kv_dtype(), namespace.rope());
            (Reverse(*depth), fields.len(), named, namespace.adapter())
        })?;
        Some(NamespaceDifference {
            fields,
            num_tokens: depth as usize * block_size,
        })
    }

    fn context(
        &self,
        seq: &TokenSequence,
        position: usize,
        neighbour: Option<Neighbour>,
        size: usize,
    ) -> Context {
        let start = position.saturating_sub(size);
        let end = position.saturating_add(size);
        let ours = seq.tokens()[start..end.min(seq.len())].to_vec();
        let mut theirs = seq.tokens()[start..position].to_vec();
        let block_size = self.forest().block_size();
        let mut node = neighbour.map(|neighbour| neighbour.node);
        let mut at = position;
        while let Some(edge) = node
            .map(|node| self.forest().node(node))
            .filter(|_| at < end)
        {
            let first = edge.depth as usize * block_size;
            let tokens = edge.blocks.tokens(block_size);
            let until = end.min(first + tokens.len());
            theirs.extend(&tokens[at - first..until - first]);
            at = until;
            node = node.and_then(|node| self.forest().only_child(node));
        }
        Context {
            start,
            ours,
            theirs,
        }
    }

    fn kind_names(&self, mask: u64) -> Vec<String> {
        let named = (0..).zip(self.kinds());
        let named = named.filter(|(bit, _)| mask >> bit & 1 == 1);
        named.map(|(_, name)| name.clone()).collect()
    }
}

fn differing(a: &Namespace, b: &Namespace) -> Vec<&'static str> {
    let fields = [
        ("model", a.model() != b.model()),
        ("kv_dtype", a.kv_dtype() != b.kv_dtype()),
        ("rope", a.rope() != b.rope()),
        ("adapter", a.adapter() != b.adapter()),
    ];
    let differ = fields.into_iter().filter(|&(_, differs)| differs);
    differ.map(|(name, _)| name).collect()
}

/// Joins names as "a", "a and b" or "a, b and c".
fn listed(names: &[impl AsRef<str>]) -> String {
    let mut text = String::new();
    for (at, name) in names.iter().enumerate() {
        if at > 0 {
            text += if at + 1 == names.len() { " and " } else { ", " };
        }
        text += name.as_ref();
    }
    text
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (position, block_size) = (self.position, self.block_size);
        write!(
            f,
            "{} of {} tokens match exactly ({} whole blocks of {block_size}). ",
            self.num_exact,
            self.num_tokens,
            self.num_exact / block_size
        )?;
        let split = position - self.context.start;
        match self.reason {
            Reason::Complete => write!(f, "Every whole block is cached.")?,
            Reason::Diverged => write!(
                f,
                "At position {position} other tokens are cached: {:?} where the prompt has {:?}, both after {:?}.",
                &self.context.theirs[split..],
                &self.context.ours[split..],
                &self.context.ours[..split]
            )?,
            Reason::Evicted => write!(
                f,
                "What the prompt has from position {position} on, {:?}, was cached there and has left.",
                &self.context.ours[split..]
            )?,
            Reason::NotCached => write!(
                f,
                "The cache ends at position {position}, after {:?}; the prompt goes on with {:?}.",
                &self.context.ours[..split],
                &self.context.ours[split..]
            )?,
            Reason::ApproximateOnly => write!(
                f,
                "From position {position} on the same tokens are cached, {:?}, but their KV is approximate.",
                &self.context.theirs[split..]
            )?,
            Reason::LaxerPolicy => write!(
                f,
                "From position {position} on the same tokens are cached, {:?}, but their KV was built under a policy \
                 that is laxer in {}.",
                &self.context.theirs[split..],
                listed(&self.laxer_in)
            )?,
            Reason::OtherNamespace => {
                write!(f, "It goes on in another namespace of the same salt.")?;
            }
        }
        if let Some(cut) = &self.cut_by {
            write!(
                f,
                " Group {:?} lets the prompt continue after {} tokens, not after {}.",
                cut.group, cut.num_tokens, self.num_exact
            )?;
        }
        if let Some(other) = &self.other_namespace {
            write!(
                f,
                " Where {} {}, {} tokens match.",
                listed(&other.fields),
                if other.fields.len() == 1 {
                    "differs"
                } else {
                    "differ"
                },
                other.num_tokens
            )?;
        }
        if !self.kinds_before.is_empty() && self.reason != Reason::Complete {
            write!(
                f,
                " The token before is tagged {}.",
                listed(&self.kinds_before)
            )?;
        }
        let WouldSave {
            exact,
            approximate,
            compute,
            out_of_scope,
        } = self.would_save;
        write!(
            f,
            " A plan would take {exact} tokens exactly and {approximate} approximately, and leave {compute} to compute."
        )?;
        if out_of_scope > 0 {
            write!(
                f,
                " Of these, {out_of_scope} are cached, but out of scope: neither in a block of the session, nor after the same first blocks."
            )?;
        }
        Ok(())
    }
}
