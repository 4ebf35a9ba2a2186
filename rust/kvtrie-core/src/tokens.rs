//! Token sequences, and the comparison of tokens.
//!
//! A token is compared by its id and, if it is in an item, by the item's digest and [`Extent`] and its offset from the
//! item's start. Every match is confirmed through a [`View`], a borrowed run of such tokens.
//!
//! # Positions
//!
//! A token takes one position, except in an item with an extent, which takes as many positions as it says, whatever its
//! tokens. The *shift* at a token is how far its position is from its number in the sequence: the sum, over the whole
//! items before it, of positions minus tokens. For tokens of an item it is that of the item's first token, because their
//! places inside the item are the item's own. Each item knows the shift at its start, so any shift is one binary search.

use std::cmp::Ordering;
use std::num::NonZeroU32;
use std::sync::atomic::{self, AtomicU64};
use std::sync::{Arc, Weak};

use crate::cursor::Cursor;
use crate::error::{Error, Result, invalid};
use crate::namespace::Namespace;

/// What a whole item takes, where its tokens do not take one position each (M-RoPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Extent {
    pub(crate) positions: NonZeroU32,
    /// Tokens of the whole item, of which a sequence that was cut may have only the first.
    pub(crate) num_tokens: u32,
}

impl Extent {
    /// The extent as one number, not 0.
    pub(crate) fn number(self) -> u64 {
        u64::from(self.positions.get()) << 32 | u64::from(self.num_tokens)
    }

    fn shift(self) -> i64 {
        i64::from(self.positions.get()) - i64::from(self.num_tokens)
    }
}

/// A range of tokens that represents something else, such as an image. Its digest says what.
#[derive(Clone, Debug)]
pub struct Item {
    start: usize,
    end: usize,
    digest: Arc<[u8]>,
    extent: Option<Extent>,
    /// The shift at its start, once it is in a sequence.
    shift: i64,
}

/// Two items are equal whatever is before them.
impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        (self.start, self.end, &self.digest, self.extent)
            == (other.start, other.end, &other.digest, other.extent)
    }
}

impl Eq for Item {}

impl Item {
    /// The longest digest, in bytes.
    pub const MAX_DIGEST: usize = 64;

    /// The most positions and tokens of an item that says how many positions it takes.
    pub const MAX_POSITIONS: usize = i32::MAX as usize;

    /// An item over the tokens `start..end`, which take one position each.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the range is empty or reversed, or the digest does not
    /// have 1 to 64 bytes.
    pub fn new(start: usize, end: usize, digest: &[u8]) -> Result<Self> {
        if start >= end {
            return Err(invalid!(
                "Item::new",
                "start and end are {start} and {end}; end must be above start"
            ));
        }
        if digest.is_empty() || digest.len() > Self::MAX_DIGEST {
            return Err(invalid!(
                "Item::new",
                "the digest has {} bytes; it must have 1 to {}",
                digest.len(),
                Self::MAX_DIGEST
            ));
        }
        Ok(Self {
            start,
            end,
            digest: digest.into(),
            extent: None,
            shift: 0,
        })
    }

    /// The item, whose whole has `num_tokens` tokens and takes `positions` positions: the token after it is at the
    /// position of its first token plus `positions`. Its range may be only the first of these tokens, where a sequence
    /// was cut. Both numbers are part of what it is: with others, it is another item.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `positions` is not in 1 to
    /// [`MAX_POSITIONS`](Self::MAX_POSITIONS), or `num_tokens` is not in the length of its range to that.
    pub fn taking(self, positions: usize, num_tokens: usize) -> Result<Self> {
        const CALL: &str = "Item::taking";
        let most = Self::MAX_POSITIONS;
        let len = self.end - self.start;
        let wide = u32::try_from(positions).ok().and_then(NonZeroU32::new);
        let Some(positions) = wide.filter(|_| positions <= most) else {
            return Err(invalid!(
                CALL,
                "positions is {positions}; it must be in [1, {most}]"
            ));
        };
        let wide = u32::try_from(num_tokens).ok();
        let Some(num_tokens) = wide.filter(|_| num_tokens >= len && num_tokens <= most) else {
            return Err(invalid!(
                CALL,
                "num_tokens is {num_tokens}; it must be in [{len}, {most}], from the tokens of the range on"
            ));
        };
        Ok(Self {
            extent: Some(Extent {
                positions,
                num_tokens,
            }),
            ..self
        })
    }

    /// First token.
    #[must_use]
    pub fn start(&self) -> usize {
        self.start
    }

    /// One past the last token.
    #[must_use]
    pub fn end(&self) -> usize {
        self.end
    }

    /// How many positions the whole item takes; `None` if its tokens take one each.
    #[must_use]
    pub fn positions(&self) -> Option<usize> {
        self.extent.map(|extent| extent.positions.get() as usize)
    }

    /// Tokens of the whole item, if it says how many positions it takes; else of its range.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.extent
            .map_or(self.end - self.start, |extent| extent.num_tokens as usize)
    }

    pub(crate) fn extent(&self) -> Option<Extent> {
        self.extent
    }

    /// Whether tokens of the item are missing at its end, which makes the position of a token after it unknown.
    fn is_cut(&self) -> bool {
        self.num_tokens() > self.end - self.start
    }

    /// The items that overlap `start..end`, cut at `end`. Their starts are kept, because offsets count from there.
    pub(crate) fn within(items: &[Self], start: usize, end: usize) -> impl Iterator<Item = Self> {
        let first = items.partition_point(|item| item.end <= start);
        items[first..]
            .iter()
            .take_while(move |item| item.start < end)
            .map(move |item| Self {
                end: item.end.min(end),
                ..item.clone()
            })
    }

    pub(crate) fn cut(items: &mut Vec<Self>, end: usize) {
        while items.last().is_some_and(|item| item.start >= end) {
            items.pop();
        }
        if let Some(item) = items.last_mut() {
            item.end = item.end.min(end);
        }
    }

    /// The shift after the whole item.
    pub(crate) fn shift_after(&self) -> i64 {
        self.shift + self.extent.map_or(0, Extent::shift)
    }

    /// The shift at token `at`, given items that ascend and the shift at the beginning of what they are of, for where
    /// none of them says it.
    pub(crate) fn shift_at(items: &[Self], at: usize, before: i64) -> i64 {
        let after = items.partition_point(|item| item.start < at);
        let Some(last) = after.checked_sub(1).map(|last| &items[last]) else {
            return items.first().map_or(before, |item| item.shift);
        };
        if at < last.start + last.num_tokens() {
            last.shift
        } else {
            last.shift_after()
        }
    }

    /// Works out the shifts of items that follow the given ones.
    fn follow(items: &mut [Self], last: Option<&Self>) {
        let mut shift = last.map_or(0, Self::shift_after);
        for item in items {
            item.shift = shift;
            shift = item.shift_after();
        }
    }

    /// The item as it is after a shift, for a restored edge.
    pub(crate) fn shifted(self, shift: i64) -> Self {
        Self { shift, ..self }
    }

    pub(crate) fn shift(&self) -> i64 {
        self.shift
    }

    /// The digest of what the range represents.
    #[must_use]
    pub fn digest(&self) -> &[u8] {
        &self.digest
    }
}

/// Token ids from position 0, in a namespace. A sequence remembers how far it was matched by the index that last used
/// it.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use kvtrie_core::{Namespace, Salt, TokenSequence};
/// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
/// let mut seq = TokenSequence::new(ns, vec![1, 2, 3], Vec::new())?;
/// seq.extend(&[4], Vec::new())?;
/// seq.truncate(2)?;
/// assert_eq!(seq.tokens(), [1, 2]);
/// # Ok::<(), kvtrie_core::Error>(())
/// ```
#[derive(Debug)]
pub struct TokenSequence {
    namespace: Arc<Namespace>,
    /// Shared with the plans of this sequence. A change copies it while a plan holds it.
    tokens: Arc<Vec<u32>>,
    items: Vec<Item>,
    /// Replaced when one of the first `held_len` tokens is cut. So an equal lineage proves that those tokens did not
    /// change.
    lineage: u64,
    held_len: usize,
    /// Upgradable while the sequence has an owner.
    owner: Weak<()>,
    pub(crate) cursor: Option<Cursor>,
}

/// The exclusive right to change a sequence: from [`TokenSequence::own`] until this value is dropped.
#[derive(Debug)]
pub struct SequenceOwner(Arc<()>);

#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) tokens: Arc<Vec<u32>>,
    pub(crate) items: Vec<Item>,
    pub(crate) lineage: u64,
}

/// The clone has no owner. It shares the tokens until one of the two changes.
impl Clone for TokenSequence {
    fn clone(&self) -> Self {
        Self {
            namespace: Arc::clone(&self.namespace),
            tokens: Arc::clone(&self.tokens),
            items: self.items.clone(),
            lineage: next_lineage(),
            held_len: 0,
            owner: Weak::new(),
            cursor: None,
        }
    }
}

fn next_lineage() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, atomic::Ordering::Relaxed)
}

impl TokenSequence {
    /// A sequence of `tokens` with `items` over some of them.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) unless the items ascend, do not overlap, are inside the
    /// tokens, and are whole or end with the tokens.
    #[inline]
    pub fn new(namespace: Arc<Namespace>, tokens: Vec<u32>, mut items: Vec<Item>) -> Result<Self> {
        if !items.is_empty() {
            check_items(&items, 0, tokens.len(), "TokenSequence::new")?;
            Item::follow(&mut items, None);
        }
        Ok(Self {
            namespace,
            tokens: Arc::new(tokens),
            items,
            lineage: next_lineage(),
            held_len: 0,
            owner: Weak::new(),
            cursor: None,
        })
    }

    /// Appends tokens, and items over them. Positions count from the start of the sequence.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) unless the items ascend, do not overlap, are inside the
    /// new tokens, and are whole or end with these; if the sequence was cut inside an item that says how many positions
    /// it takes; or if the sequence has an owner. Nothing is appended then.
    pub fn extend(&mut self, tokens: &[u32], mut items: Vec<Item>) -> Result<()> {
        const CALL: &str = "TokenSequence::extend";
        self.check_free(CALL)?;
        let len = self.tokens.len();
        check_items(&items, len, len + tokens.len(), CALL)?;
        self.check_whole(tokens.len(), CALL)?;
        self.push(tokens);
        if !items.is_empty() {
            Item::follow(&mut items, self.items.last());
            self.items.extend(items);
        }
        Ok(())
    }

    /// Appends tokens without items, for the owner.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `owner` does not own the sequence, or the sequence was
    /// cut inside an item that says how many positions it takes.
    pub fn extend_as(&mut self, owner: &SequenceOwner, tokens: &[u32]) -> Result<()> {
        const CALL: &str = "TokenSequence::extend_as";
        self.check_owner(owner, CALL)?;
        self.check_whole(tokens.len(), CALL)?;
        self.push(tokens);
        Ok(())
    }

    /// Refuses to append to a part of an item: the positions of what follows are unknown.
    #[inline]
    fn check_whole(&self, num_new: usize, call: &'static str) -> Result<()> {
        match self.items.last() {
            Some(last) if num_new > 0 && last.is_cut() => Err(follows_a_part(last, call)),
            _ => Ok(()),
        }
    }

    fn push(&mut self, tokens: &[u32]) {
        if let Some(own) = Arc::get_mut(&mut self.tokens) {
            own.extend_from_slice(tokens);
        } else {
            let mut own = Vec::with_capacity((self.tokens.len() + tokens.len()) * 5 / 4);
            own.extend_from_slice(&self.tokens);
            own.extend_from_slice(tokens);
            self.tokens = Arc::new(own);
        }
    }

    /// Keeps the first `len` tokens. An item across the cut ends there.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `len` is larger than the sequence, or the sequence has
    /// an owner.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        const CALL: &str = "TokenSequence::truncate";
        self.check_free(CALL)?;
        self.cut(len, CALL)
    }

    /// As [`truncate`](Self::truncate), for the owner.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `len` is larger than the sequence, or `owner` does not
    /// own it.
    pub fn truncate_as(&mut self, owner: &SequenceOwner, len: usize) -> Result<()> {
        const CALL: &str = "TokenSequence::truncate_as";
        self.check_owner(owner, CALL)?;
        self.cut(len, CALL)
    }

    fn cut(&mut self, len: usize, call: &'static str) -> Result<()> {
        if len > self.tokens.len() {
            return Err(invalid!(
                call,
                "len is {len}; it must be in [0, {}], the tokens of the sequence",
                self.tokens.len()
            ));
        }
        match Arc::get_mut(&mut self.tokens) {
            Some(own) => own.truncate(len),
            None => self.tokens = Arc::new(self.tokens[..len].to_vec()),
        }
        Item::cut(&mut self.items, len);
        if len < self.held_len {
            self.lineage = next_lineage();
            self.held_len = 0;
        }
        if let Some(cursor) = &mut self.cursor {
            cursor.truncate(len);
        }
        Ok(())
    }

    /// Gives the sequence an owner; returns `None` if it has one. Until the owner is dropped, only
    /// [`extend_as`](Self::extend_as) and [`truncate_as`](Self::truncate_as) change the tokens.
    #[must_use]
    pub fn own(&mut self) -> Option<SequenceOwner> {
        if self.is_owned() {
            return None;
        }
        let owner = SequenceOwner(Arc::new(()));
        self.owner = Arc::downgrade(&owner.0);
        Some(owner)
    }

    /// Whether the sequence has an owner.
    #[must_use]
    pub fn is_owned(&self) -> bool {
        self.owner.strong_count() > 0
    }

    /// Whether this is the sequence's owner.
    #[must_use]
    pub fn is_owned_by(&self, owner: &SequenceOwner) -> bool {
        Weak::as_ptr(&self.owner) == Arc::as_ptr(&owner.0)
    }

    fn check_free(&self, call: &'static str) -> Result<()> {
        if self.is_owned() {
            return Err(invalid!(
                call,
                "this sequence of {} tokens has an owner, which alone changes it",
                self.tokens.len()
            ));
        }
        Ok(())
    }

    fn check_owner(&self, owner: &SequenceOwner, call: &'static str) -> Result<()> {
        if self.is_owned_by(owner) {
            return Ok(());
        }
        Err(invalid!(
            call,
            "this sequence of {} tokens has another owner, or none",
            self.tokens.len()
        ))
    }

    /// The token ids.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The items, ascending.
    #[must_use]
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &Arc<Namespace> {
        &self.namespace
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The position of token number `at`; of the next token, if `at` is the number of tokens. For a token of an item
    /// that says how many positions it takes, that of the item's first token.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `at` is beyond the tokens, or the sequence was cut
    /// inside such an item and `at` is the number of tokens.
    pub fn position(&self, at: usize) -> Result<usize> {
        const CALL: &str = "TokenSequence::position";
        if at > self.tokens.len() {
            return Err(invalid!(
                CALL,
                "the token is {at}; it must be in [0, {}], the tokens of the sequence",
                self.tokens.len()
            ));
        }
        if at == self.tokens.len() {
            self.check_whole(1, CALL)?;
        }
        let item = self
            .items
            .get(self.items.partition_point(|item| item.end <= at));
        let first = item.filter(|item| item.start <= at && item.extent.is_some());
        let first = first.map_or(at, |item| item.start);
        let shift = Item::shift_at(&self.items, first, 0);
        Ok(first.saturating_add_signed(isize::try_from(shift).unwrap_or(isize::MAX)))
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(crate) fn view(&self) -> View<'_> {
        View {
            tokens: &self.tokens,
            base: 0,
            items: &self.items,
        }
    }

    /// Makes every later truncation below `len` tokens replace the lineage.
    pub(crate) fn hold(&mut self, len: usize) {
        self.held_len = self.held_len.max(len);
    }

    pub(crate) fn snapshot(&mut self) -> Snapshot {
        self.hold(self.tokens.len());
        Snapshot {
            namespace: Arc::clone(&self.namespace),
            tokens: Arc::clone(&self.tokens),
            items: self.items.clone(),
            lineage: self.lineage,
        }
    }

    /// Whether the sequence begins with the tokens of the snapshot and is in its namespace.
    pub(crate) fn starts_with(&self, snapshot: &Snapshot) -> bool {
        if self.lineage == snapshot.lineage {
            return true;
        }
        let whole = View {
            tokens: &snapshot.tokens,
            base: 0,
            items: &snapshot.items,
        };
        self.namespace == snapshot.namespace && self.view().common(whole) == snapshot.tokens.len()
    }
}

#[cold]
fn follows_a_part(item: &Item, call: &'static str) -> Error {
    invalid!(
        call,
        "the sequence was cut at {} inside an item of {} tokens from {} on; nothing follows a part of an item that takes \
         {} positions",
        item.end,
        item.num_tokens(),
        item.start,
        item.positions().unwrap_or_default()
    )
}

fn check_items(items: &[Item], from: usize, len: usize, call: &'static str) -> Result<()> {
    let mut end = from;
    for item in items {
        if item.start < end || item.end > len {
            return Err(invalid!(
                call,
                "items has [{}, {}); it must lie in [{end}, {len}] (items ascend and do not overlap)",
                item.start,
                item.end
            ));
        }
        end = item.end;
        if item.is_cut() && item.end < len {
            return Err(invalid!(
                call,
                "items has [{}, {}), the first of {} tokens; nothing follows a part of an item that takes {} positions",
                item.start,
                item.end,
                item.num_tokens(),
                item.positions().unwrap_or_default()
            ));
        }
    }
    Ok(())
}

/// An item's digest, a token's offset in the item, and the item's extent.
type Inside<'a> = (&'a [u8], usize, Option<Extent>);

/// A run of tokens that begins at token `base`, with the items that may overlap it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) base: usize,
    /// At absolute positions, ascending. They may extend beyond the run.
    pub(crate) items: &'a [Item],
}

impl<'a> View<'a> {
    pub(crate) fn slice(self, start: usize, end: usize) -> View<'a> {
        View {
            tokens: &self.tokens[start - self.base..end - self.base],
            base: start,
            items: self.items,
        }
    }

    /// Number of equal tokens from the start. The positions of the two runs may differ.
    pub(crate) fn common(self, other: View<'_>) -> usize {
        let same = common_ids(self.tokens, other.tokens);
        if self.items.is_empty() && other.items.is_empty() {
            return same;
        }
        let mut at = 0;
        while at < same {
            let (mine, my_end) = self.item_at(at);
            let (theirs, their_end) = other.item_at(at);
            if mine != theirs {
                return at;
            }
            at = my_end.min(their_end);
        }
        same
    }

    /// Number of equal tokens from the end. The positions of the two runs may differ.
    pub(crate) fn common_end(self, other: View<'_>) -> usize {
        let same = common_end_ids(self.tokens, other.tokens);
        if self.items.is_empty() && other.items.is_empty() {
            return same;
        }
        let (mine, theirs) = (self.tokens.len() - same, other.tokens.len() - same);
        let differs = |&at: &usize| self.item_at(mine + at).0 != other.item_at(theirs + at).0;
        let last = (0..same).rev().find(differs);
        last.map_or(same, |at| same - at - 1)
    }

    /// Orders two runs by their first differing token: by id, then no item before an item, then by digest, offset and
    /// extent. A run sorts after its own prefixes.
    pub(crate) fn order(self, other: View<'_>) -> Ordering {
        let same = self.common(other);
        match (self.tokens.get(same), other.tokens.get(same)) {
            (Some(mine), Some(theirs)) => mine
                .cmp(theirs)
                .then_with(|| self.item_at(same).0.cmp(&other.item_at(same).0)),
            (mine, theirs) => mine.is_some().cmp(&theirs.is_some()),
        }
    }

    /// For each item that overlaps the run, its digest, one number made of its place in the run, its offset in the item
    /// and its length, and its extent as a number, or 0. Two runs of equal ids are equal if and only if these lists are.
    pub(crate) fn items_inside(self) -> impl Iterator<Item = (u64, u64, &'a [u8])> {
        let end = self.base + self.tokens.len();
        let first = self.items.partition_point(|item| item.end <= self.base);
        self.items[first..]
            .iter()
            .take_while(move |item| item.start < end)
            .map(move |item| {
                let begin = item.start.max(self.base);
                let (inside, count) = (begin - self.base, item.end.min(end) - begin);
                let place =
                    inside as u64 | (count as u64) << 16 | ((begin - item.start) as u64) << 32;
                let extent = item.extent.map_or(0, Extent::number);
                (place, extent, &*item.digest)
            })
    }

    /// What the token is a part of, if it is in an item, and the offset in the run up to which that holds.
    fn item_at(self, offset: usize) -> (Option<Inside<'a>>, usize) {
        let at = self.base + offset;
        let index = self.items.partition_point(|item| item.end <= at);
        match self.items.get(index) {
            Some(item) if item.start <= at => {
                let inside = (&*item.digest, at - item.start, item.extent);
                (Some(inside), item.end - self.base)
            }
            Some(item) => (None, item.start - self.base),
            None => (None, usize::MAX),
        }
    }
}

/// Compares chunks as memory, and ids only in the first chunk that differs.
fn common_ids(a: &[u32], b: &[u32]) -> usize {
    const CHUNK: usize = 256;
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let mut at = 0;
    while at < len {
        let end = (at + CHUNK).min(len);
        if a[at..end] != b[at..end] {
            return at
                + a[at..end]
                    .iter()
                    .zip(&b[at..end])
                    .take_while(|(x, y)| x == y)
                    .count();
        }
        at = end;
    }
    len
}

fn common_end_ids(a: &[u32], b: &[u32]) -> usize {
    const CHUNK: usize = 64;
    let len = a.len().min(b.len());
    let (a, b) = (&a[a.len() - len..], &b[b.len() - len..]);
    let mut at = len;
    while at > 0 {
        let start = at.saturating_sub(CHUNK);
        if a[start..at] != b[start..at] {
            let pairs = a[start..at].iter().zip(&b[start..at]);
            return len - at + pairs.rev().take_while(|(x, y)| x == y).count();
        }
        at = start;
    }
    len
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(start: usize, end: usize, digest: &[u8]) -> Item {
        Item::new(start, end, digest).unwrap()
    }

    fn view<'a>(tokens: &'a [u32], items: &'a [Item]) -> View<'a> {
        View {
            tokens,
            base: 0,
            items,
        }
    }

    #[test]
    fn a_clone_shares_the_tokens_until_one_changes_and_has_no_owner() {
        let namespace = Namespace::new("m", "auto", "default", None, crate::Salt::Shared).unwrap();
        let mut seq =
            TokenSequence::new(Arc::new(namespace), vec![1, 2, 3], vec![item(1, 3, b"x")]).unwrap();
        let owner = seq.own().unwrap();
        assert!(seq.own().is_none());
        let mut copy = seq.clone();
        assert!(Arc::ptr_eq(&seq.tokens, &copy.tokens));
        assert!(seq.is_owned() && !copy.is_owned());
        seq.extend_as(&owner, &[4]).unwrap();
        assert_eq!(
            (seq.tokens(), copy.tokens()),
            (&[1, 2, 3, 4][..], &[1, 2, 3][..])
        );
        copy.truncate(2).unwrap();
        copy.extend(&[9], Vec::new()).unwrap();
        assert_eq!((seq.items()[0].end(), copy.items()[0].end()), (3, 2));
        assert!(copy.extend_as(&owner, &[4]).is_err() && copy.truncate_as(&owner, 1).is_err());
        assert!(seq.extend(&[5], Vec::new()).is_err() && seq.truncate(1).is_err());
        assert!(seq.truncate_as(&owner, 5).is_err());
        // A snapshot of one clone is no proof about the other, whose tokens differ now.
        let snapshot = seq.snapshot();
        assert!(seq.starts_with(&snapshot) && !copy.starts_with(&snapshot));
    }

    #[test]
    fn common_ids_finds_the_first_difference_at_any_place() {
        for len in [0, 1, 255, 256, 257, 600] {
            let a: Vec<u32> = (0..600).collect();
            let mut b = a.clone();
            if let Some(token) = b.get_mut(len) {
                *token = 9999;
            }
            assert_eq!(common_ids(&a, &b), len);
        }
    }

    #[test]
    fn common_end_ids_finds_the_last_difference_at_any_place() {
        for len in [0, 1, 63, 64, 65, 299, 300] {
            let a: Vec<u32> = (0..300).collect();
            let mut b = vec![7777, 8888];
            b.extend(&a);
            if let Some(at) = (b.len() - len).checked_sub(1) {
                b[at] = 9999;
            }
            assert_eq!(common_end_ids(&a, &b), len);
            assert_eq!(common_end_ids(&b, &a), len);
        }
    }

    #[test]
    fn runs_with_items_compare_wherever_they_begin() {
        let tokens = [1, 1, 1, 1, 1, 1];
        let (a, b) = ([item(2, 4, b"x")], [item(12, 14, b"x")]);
        let here = view(&tokens, &a);
        let there = View {
            base: 10,
            ..view(&tokens, &b)
        };
        assert_eq!(here.common(there), 6);
        assert_eq!(here.common_end(there), 6);
        assert_eq!(here.order(there), Ordering::Equal);
        let other = View {
            base: 9,
            ..view(&tokens, &b)
        };
        assert_eq!(here.common(other), 2);
        assert_eq!(here.common_end(other), 1);
        assert_eq!(view(&tokens, &a).common_end(view(&tokens, &[])), 2);
        // The item began before both runs and has the same offset in both.
        assert_eq!(here.slice(3, 6).common_end(there.slice(13, 16)), 3);
        assert_eq!(here.slice(3, 6).common_end(there.slice(12, 15)), 1);
    }

    #[test]
    fn common_stops_where_an_item_differs() {
        let tokens = [1, 1, 1, 1, 1, 1];
        let (a, b) = ([item(2, 4, b"x")], [item(2, 4, b"y")]);
        assert_eq!(view(&tokens, &a).common(view(&tokens, &b)), 2);
        assert_eq!(view(&tokens, &a).common(view(&tokens, &[])), 2);
        assert_eq!(view(&tokens, &a).common(view(&tokens, &a)), 6);
    }

    #[test]
    fn common_distinguishes_the_offset_in_an_item() {
        let tokens = [1, 1, 1, 1];
        let (a, b) = ([item(0, 2, b"x"), item(2, 4, b"x")], [item(0, 4, b"x")]);
        assert_eq!(view(&tokens, &a).common(view(&tokens, &b)), 2);
    }

    #[test]
    fn common_ignores_where_a_cut_item_would_have_ended() {
        let tokens = [1, 1, 1, 1];
        let (a, b) = ([item(1, 4, b"x")], [item(1, 3, b"x")]);
        assert_eq!(view(&tokens, &a).common(view(&tokens, &b)), 3);
        assert_eq!(view(&tokens[..3], &a).common(view(&tokens[..3], &b)), 3);
    }

    #[test]
    fn order_is_by_first_difference_then_length() {
        let items = [item(1, 2, b"x")];
        assert_eq!(view(&[1, 2], &[]).order(view(&[1, 3], &[])), Ordering::Less);
        assert_eq!(
            view(&[1, 2], &[]).order(view(&[1, 2], &items)),
            Ordering::Less
        );
        assert_eq!(view(&[1], &[]).order(view(&[1, 2], &[])), Ordering::Less);
        assert_eq!(
            view(&[1, 2], &[]).order(view(&[1, 2], &[])),
            Ordering::Equal
        );
    }
}
