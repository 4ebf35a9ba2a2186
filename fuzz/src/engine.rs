//! A serving engine in miniature, whose KV can be checked.
//!
//! The KV of a token is a number that depends on every token before it. The harness holds the truth about each block:
//! who owns it, and what its slots contain. It then makes every call of the index in any order and at any moment, and
//! looks for blocks that were lost, handed out twice, written while shared, or found with the wrong KV in them.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use kvtrie_core::{
    BlockId, Class, Config, ErrorKind, Imported, InsertOptions, Inserted, Item, LookupOptions,
    Namespace, PlanOptions, RadixIndex, ReusePlan, ReusePolicy, Salt, Scope, Segment, SessionId,
    Source, Span, TokenSequence,
};

use crate::bytes::Bytes;

const MAX_TOKENS: usize = 64;
const MAX_REQUESTS: usize = 4;
const MAX_PROMPTS: usize = 16;
/// What an approximate slot contains: never the KV of anything.
const APPROXIMATE: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Free,
    Held,
    Index,
}

/// How often a run met what it is meant to test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Requests that found blocks.
    pub hits: u64,
    /// Tokens copied from a block in which a match ended.
    pub copied: u64,
    /// Blocks of a request that another one had inserted already.
    pub duplicates: u64,
    /// Blocks evicted for a request.
    pub evicted: u64,
    /// Requests that did not fit.
    pub refused: u64,
    /// Steps after which a block was condemned.
    pub condemned: u64,
    /// Steps after which there was a hole.
    pub holes: u64,
    /// Steps after which an approximate block was indexed.
    pub approximate: u64,
    /// Approximate blocks that exact ones replaced.
    pub replaced: u64,
    /// Requests whose blocks belong to an older epoch.
    pub epochs: u64,
    /// Blocks that were marked dead.
    pub dead: u64,
    /// Blocks that were removed from the middle.
    pub removed: u64,
    /// Tokens of moved runs that a plan copies.
    pub moved: u64,
    /// Tokens of moved runs that a plan was told to compute.
    pub repaired: u64,
}

/// What a slot of the index is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fact {
    /// The token, and its place in an item.
    content: (u32, u64),
    /// The token's KV if all before it is exact, which stands for its whole prefix.
    prefix: u64,
}

#[derive(Clone, Debug)]
struct Prompt {
    namespace: usize,
    ids: Vec<u32>,
    item: Option<(usize, usize, u8)>,
}

#[derive(Debug)]
struct Request {
    seq: TokenSequence,
    plan: ReusePlan,
    table: Vec<BlockId>,
    num_computed: usize,
    num_indexed: usize,
    /// Whether an insert returned approximate blocks: tokens computed after them are approximate
    /// too.
    approximate: bool,
}

struct Engine {
    index: RadixIndex,
    block_size: usize,
    namespaces: Vec<Arc<Namespace>>,
    owners: Vec<Owner>,
    slots: Vec<u64>,
    facts: Vec<Fact>,
    /// Per block: its path, by the last `prefix` of each block.
    paths: Vec<Vec<u64>>,
    /// The paths that were inserted with each session.
    named: BTreeSet<(u64, u8)>,
    prompts: Vec<Prompt>,
    requests: Vec<Request>,
    seen: Seen,
}

/// Runs one input.
///
/// # Panics
/// When the index breaks a rule.
pub fn run(data: &[u8]) -> Seen {
    let mut bytes = Bytes::new(data);
    let mut engine = Engine::new(&mut bytes);
    while !bytes.is_empty() {
        engine.step(&mut bytes);
        engine.check();
    }
    while let Some(request) = engine.requests.pop() {
        engine.finish(request);
        engine.check();
    }
    assert_eq!(engine.count(Owner::Held), 0, "a block is held by nobody");
    let all = engine.index.reset();
    engine.give_back(&all);
    engine.check();
    let quarantined = engine.index.quarantined().count();
    assert_eq!(
        engine.index.stats().quarantined,
        quarantined as u64,
        "a pin is left"
    );
    assert_eq!(
        engine.count(Owner::Free) + quarantined,
        engine.owners.len(),
        "a block was lost"
    );
    engine.seen
}

impl Engine {
    fn new(bytes: &mut Bytes<'_>) -> Self {
        let block_size = 1 + bytes.below(5);
        let num_blocks = 1 + bytes.below(32);
        let config = Config {
            num_blocks: num_blocks as u64,
            block_size,
            seed: bytes.below(4) as u64,
            hash_bits: [64, 0, 4, 8][bytes.below(4)],
            moved_runs: bytes.below(2) == 1,
            min_run: 8 + bytes.below(4),
            ..Config::seeded(0)
        };
        let salts = [Salt::Shared, Salt::Tenant("tenant".into())];
        let namespaces = salts.map(|salt| {
            Arc::new(Namespace::new("m", "auto", "default", None, salt).expect("a valid namespace"))
        });
        Self {
            index: RadixIndex::new(config).expect("a valid config"),
            block_size,
            namespaces: namespaces.to_vec(),
            owners: vec![Owner::Free; num_blocks],
            slots: vec![0; num_blocks * block_size],
            facts: vec![Fact::default(); num_blocks * block_size],
            paths: vec![Vec::new(); num_blocks],
            named: BTreeSet::new(),
            prompts: vec![Prompt {
                namespace: 0,
                ids: Vec::new(),
                item: None,
            }],
            requests: Vec::new(),
            seen: Seen::default(),
        }
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.below(18) {
            0..=4 => self.admit(bytes),
            5..=7 => self.decode(bytes),
            8..=9 => {
                if let Some(at) = self.pick_request(bytes) {
                    let request = self.requests.swap_remove(at);
                    self.finish(request);
                }
            }
            10 => {
                let n = bytes.below(8);
                let able = self.index.num_waiting() + self.index.num_evictable();
                let ids = self.index.evict(n);
                assert_eq!(
                    ids.len(),
                    n.min(index(able)),
                    "evict({n}) with {able} to go"
                );
                self.give_back(&ids);
            }
            11 => {
                let ids: Vec<_> = (0..1 + bytes.below(4))
                    .map(|_| self.any_block(bytes))
                    .collect();
                let gone = self.index.discard(&ids).expect("ids of the pool");
                assert!(
                    gone.iter().all(|id| ids.contains(id)),
                    "discard returned another id"
                );
                self.give_back(&gone);
            }
            12 => self.lookup(bytes),
            13 => self.import(bytes),
            14 => self.misuse(bytes),
            15 => self.mark_dead(bytes),
            16 => self.remove_spans(bytes),
            _ => match bytes.below(7) {
                0 => {
                    let namespace = Arc::clone(&self.namespaces[bytes.below(2)]);
                    let ids = self.index.drop_namespace(&namespace);
                    self.give_back(&ids);
                }
                1 => {
                    let ids = self.index.reset();
                    self.give_back(&ids);
                }
                2 => {
                    let ids = self.index.take_freed();
                    self.give_back(&ids);
                }
                3 => self.roll_back(bytes),
                4 => self.quarantine(bytes),
                5 => self.move_runs(bytes),
                _ => self.tag(bytes),
            },
        }
    }

    /// A new prompt: one of the earlier ones with an edit.
    fn prompt(&mut self, bytes: &mut Bytes<'_>) -> Prompt {
        let mut prompt = self.prompts[bytes.below(self.prompts.len())].clone();
        let keep = bytes.below(prompt.ids.len() + 1);
        if bytes.one_in(3) {
            prompt.ids.truncate(keep);
        } else if bytes.one_in(3) {
            prompt.ids.splice(keep.., [7]);
        }
        for _ in 0..bytes.below(24) {
            prompt
                .ids
                .push(u32::try_from(bytes.below(3)).expect("below 3"));
        }
        prompt.ids.truncate(MAX_TOKENS);
        if bytes.one_in(8) {
            prompt.namespace = bytes.below(2);
        }
        if bytes.one_in(8) && !prompt.ids.is_empty() {
            let start = bytes.below(prompt.ids.len());
            prompt.item = Some((
                start,
                start + 1 + bytes.below(prompt.ids.len() - start),
                1 + bytes.below(2) as u8,
            ));
        }
        prompt.item = prompt.item.filter(|&(_, end, _)| end <= prompt.ids.len());
        if self.prompts.len() == MAX_PROMPTS {
            self.prompts.swap_remove(bytes.below(MAX_PROMPTS));
        }
        self.prompts.push(prompt.clone());
        prompt
    }

    fn sequence(&self, prompt: &Prompt) -> TokenSequence {
        let items = prompt
            .item
            .map(|(start, end, digest)| Item::new(start, end, &[digest]).expect("a valid item"));
        let namespace = Arc::clone(&self.namespaces[prompt.namespace]);
        TokenSequence::new(namespace, prompt.ids.clone(), items.into_iter().collect())
            .expect("a valid sequence")
    }

    fn admit(&mut self, bytes: &mut Bytes<'_>) {
        if self.requests.len() == MAX_REQUESTS {
            return;
        }
        let prompt = self.prompt(bytes);
        let mut seq = self.sequence(&prompt);
        let keep_last = bytes.below(3);
        let pin = !bytes.one_in(8);
        let policy = ReusePolicy {
            partial_blocks: !bytes.one_in(4),
            ..ReusePolicy::EXACT_ONLY
        };
        let mut ids = Vec::new();
        let untouched = LookupOptions {
            keep_last,
            touch: false,
            ..LookupOptions::default()
        };
        let found = self
            .index
            .lookup(&mut seq, untouched, &mut ids)
            .expect("a valid lookup");
        let plan = self
            .index
            .plan(
                &mut seq,
                &policy,
                PlanOptions {
                    keep_last,
                    pin,
                    ..PlanOptions::default()
                },
            )
            .expect("a valid plan");
        assert_eq!(plan.blocks(), ids, "a plan goes as far as a lookup");
        assert!(plan.num_tokens(Class::Exact) >= found.num_tokens);
        assert_eq!(
            plan.num_tokens(Class::Approximate),
            0,
            "this version plans exact reuse"
        );
        let mut at = 0;
        for segment in plan.segments() {
            assert!(
                segment.start == at && segment.end > at,
                "segments cover every token once"
            );
            at = segment.end;
        }
        assert_eq!(at, seq.len(), "segments cover the prompt");
        assert!(plan.num_tokens(Class::Compute) >= keep_last.min(seq.len()));
        self.expect_kv(&seq, &ids, found.num_tokens);
        self.seen.hits += u64::from(!ids.is_empty());
        if !pin {
            assert!(
                self.index
                    .validate(&plan)
                    .expect("a plan of this index")
                    .iter()
                    .all(|&stays| stays)
            );
            self.index.release(&plan).expect("a live plan");
            return;
        }
        let Some(fresh) = self.allocate(plan.num_new_blocks()) else {
            self.index.release(&plan).expect("a live plan");
            return;
        };
        let table: Vec<_> = plan.blocks().iter().copied().chain(fresh).collect();
        // The request is aborted before its copy, before its gaps are computed, in the middle of one, or not at all.
        let mut request = Request {
            num_computed: found.num_tokens,
            num_indexed: 0,
            approximate: false,
            seq,
            plan,
            table,
        };
        let cut = bytes.below(4);
        if cut > 0 {
            self.copy(&request);
            // Exact tokens after a gap are recomputed, with the same result.
            let mut segments = request.plan.segments().iter();
            let gap = segments.find(|segment| segment.class != Class::Exact);
            request.num_computed = gap.map_or(request.seq.len(), |gap| gap.start);
            self.index
                .release_sources(&request.plan)
                .expect("a live plan");
        }
        let len = request.seq.len();
        let until = match cut {
            0 | 1 => request.num_computed,
            2 => request.num_computed + bytes.below(len - request.num_computed + 1),
            _ => len,
        };
        self.compute(&mut request, until);
        if until < len {
            return self.finish(request);
        }
        self.share(&mut request, 0);
        self.requests.push(request);
    }

    fn decode(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = self.pick_request(bytes) else {
            return;
        };
        let mut request = self.requests.swap_remove(at);
        for _ in 0..1 + bytes.below(8) {
            if request.seq.len() >= 2 * MAX_TOKENS {
                break;
            }
            let token = u32::try_from(bytes.below(3)).expect("below 3");
            request
                .seq
                .extend(&[token], Vec::new())
                .expect("a valid token");
            if request.table.len() * self.block_size < request.seq.len() {
                let Some(fresh) = self.allocate(1) else {
                    return self.finish(request);
                };
                request.table.extend(fresh);
            }
            let len = request.seq.len();
            self.compute(&mut request, len);
            if request.num_computed / self.block_size > request.num_indexed {
                let from = if bytes.one_in(4) {
                    0
                } else {
                    request.num_indexed
                };
                self.share(&mut request, from);
            }
        }
        self.requests.push(request);
    }

    /// Drops the last tokens of a request, as a rejected draft does. Shared tokens stay computed.
    fn roll_back(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = self.pick_request(bytes) else {
            return;
        };
        let mut request = self.requests.swap_remove(at);
        let least = request.num_indexed * self.block_size;
        let len = least.max(request.seq.len().saturating_sub(bytes.below(6)));
        // A plan belongs to the sequence that starts with its tokens.
        let planned: usize = request
            .plan
            .segments()
            .last()
            .map_or(0, |segment| segment.end);
        let len = len.max(planned).min(request.seq.len());
        request.seq.truncate(len).expect("within the sequence");
        request.num_computed = request.num_computed.min(len);
        self.requests.push(request);
    }

    /// Inserts computed blocks from block `from` on.
    fn share(&mut self, request: &mut Request, from: usize) {
        let options = InsertOptions {
            start: from * self.block_size,
            session: session(session_of(&request.seq)),
            ..InsertOptions::new(request.num_computed, Source::Plan(&request.plan))
        };
        let done = self
            .index
            .insert(&mut request.seq, &request.table[from..], options)
            .expect("a valid insert");
        self.take(&done, &request.seq, from);
        request.table[from..from + done.blocks.len()].copy_from_slice(&done.blocks);
        request.num_indexed = request.num_indexed.max(from + done.blocks.len());
        let shared = from + done.blocks.len();
        request.approximate |= !done.blocks.is_empty() && done.num_exact < shared * self.block_size;
        // Surplus blocks stay held: the request goes on.
        self.give_back_held(&done.duplicates);
        self.give_back(&done.freed);
    }

    fn finish(&mut self, mut request: Request) {
        let options = InsertOptions {
            session: session(session_of(&request.seq)),
            ..InsertOptions::new(request.num_computed, Source::Plan(&request.plan))
        };
        let done = self
            .index
            .insert(&mut request.seq, &request.table, options)
            .expect("a valid insert");
        self.take(&done, &request.seq, 0);
        let wanted = request.num_computed / self.block_size;
        self.seen.epochs += u64::from(wanted > 0 && done.blocks.is_empty());
        self.give_back_held(&done.duplicates);
        self.give_back_held(&done.surplus);
        self.give_back(&done.freed);
        self.index.release(&request.plan).expect("a live plan");
        let again = self
            .index
            .release(&request.plan)
            .expect_err("a second release");
        assert_eq!(again.kind(), ErrorKind::StaleHandle);
        let freed = self.index.take_freed();
        self.give_back(&freed);
    }

    fn lookup(&mut self, bytes: &mut Bytes<'_>) {
        let prompt = self.prompt(bytes);
        let mut seq = self.sequence(&prompt);
        let mut ids = Vec::new();
        let found = self
            .index
            .lookup(&mut seq, LookupOptions::default(), &mut ids)
            .expect("a valid lookup");
        assert_eq!(found.num_tokens, ids.len() * self.block_size);
        self.expect_kv(&seq, &ids, found.num_tokens);
    }

    /// KV from elsewhere, exact up to some position and wrong after it.
    fn import(&mut self, bytes: &mut Bytes<'_>) {
        let prompt = self.prompt(bytes);
        let mut seq = self.sequence(&prompt);
        let Some(table) = self.allocate(seq.len() / self.block_size) else {
            return;
        };
        let exact_until = bytes.below(seq.len() + 1);
        let truth = self.truth(&seq);
        for (at, &value) in truth.iter().enumerate().take(table.len() * self.block_size) {
            let end = (at / self.block_size + 1) * self.block_size;
            let value = if end <= exact_until {
                value
            } else {
                APPROXIMATE
            };
            self.write(&table, at, value);
        }
        let hops = 1 + u16::from(bytes.one_in(2));
        let source = Source::Imported(Imported::new(exact_until, hops));
        let options = InsertOptions {
            session: session(session_of(&seq)),
            ..InsertOptions::new(prompt.ids.len(), source)
        };
        let done = self
            .index
            .insert(&mut seq, &table, options)
            .expect("a valid insert");
        self.take(&done, &seq, 0);
        self.give_back_held(&done.duplicates);
        self.give_back_held(&done.surplus);
        self.give_back(&done.freed);
    }

    /// Calls that must fail and change nothing.
    fn misuse(&mut self, bytes: &mut Bytes<'_>) {
        let prompt = self.prompt(bytes);
        let mut seq = self.sequence(&prompt);
        let before = self.index.digest();
        let num_blocks = self.owners.len();
        let kind = match bytes.below(4) {
            0 => {
                let ids = vec![
                    BlockId(u32::try_from(num_blocks).expect("a small pool"));
                    seq.len() / self.block_size + 1
                ];
                self.insert_error(&mut seq, &ids, 0, Source::Computed)
            }
            1 => {
                let ids = vec![BlockId(0); seq.len() / self.block_size + 2];
                self.insert_error(&mut seq, &ids, 0, Source::Computed)
            }
            2 => {
                let more = seq.len() + 1;
                let ids = vec![BlockId(0); more];
                self.insert_error(&mut seq, &ids, more, Source::Computed)
            }
            _ => {
                let policy = ReusePolicy {
                    min_run: Some(Config::MIN_RUN - 1),
                    ..ReusePolicy::EXACT_ONLY
                };
                let error = self
                    .index
                    .plan(&mut seq, &policy, PlanOptions::default())
                    .expect_err("no index finds runs as short as that");
                error.kind()
            }
        };
        assert!(
            matches!(kind, ErrorKind::InvalidArgument | ErrorKind::BlockInUse),
            "{kind:?}"
        );
        assert_eq!(
            self.index.digest(),
            before,
            "a call that fails changes nothing"
        );
    }

    fn insert_error(
        &mut self,
        seq: &mut TokenSequence,
        ids: &[BlockId],
        num_computed: usize,
        source: Source<'_>,
    ) -> ErrorKind {
        self.index
            .insert(seq, ids, InsertOptions::new(num_computed, source))
            .expect_err("a wrong insert")
            .kind()
    }

    /// A cached sequence, and ascending ranges of it.
    fn spans(&mut self, bytes: &mut Bytes<'_>) -> (TokenSequence, Vec<(usize, usize)>) {
        let prompt = self.prompts[bytes.below(self.prompts.len())].clone();
        let seq = match self.pick_request(bytes) {
            Some(at) if bytes.below(2) == 0 => {
                let seq = &self.requests[at].seq;
                let (tokens, items) = (seq.tokens().to_vec(), seq.items().to_vec());
                TokenSequence::new(Arc::clone(seq.namespace()), tokens, items)
                    .expect("a valid sequence")
            }
            _ => self.sequence(&prompt),
        };
        let mut ends: Vec<usize> = (0..2 * bytes.below(4))
            .map(|_| bytes.below(seq.len() + 1))
            .collect();
        ends.sort_unstable();
        let ranges = ends.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        let ranges = ranges.collect();
        (seq, ranges)
    }

    fn mark_dead(&mut self, bytes: &mut Bytes<'_>) {
        let (seq, ranges) = self.spans(bytes);
        let before = self.index.stats().dead;
        let marked = self.index.mark_dead(&seq, &ranges).expect("good ranges");
        assert_eq!(self.index.stats().dead, before + marked);
        self.seen.dead += marked;
    }

    fn remove_spans(&mut self, bytes: &mut Bytes<'_>) {
        let (seq, ranges) = self.spans(bytes);
        let force = bytes.below(2) == 0;
        let removed = self
            .index
            .remove_spans(&seq, &ranges, force)
            .expect("good ranges");
        assert!(!force || removed.kept.is_empty(), "kept {:?}", removed.kept);
        for id in removed.kept.iter().chain(&removed.condemned) {
            assert_eq!(self.owners[id.0 as usize], Owner::Index);
        }
        self.give_back(&removed.freed);
        self.seen.removed += (removed.freed.len() + removed.condemned.len()) as u64;
    }

    fn tag(&mut self, bytes: &mut Bytes<'_>) {
        let prompt = self.prompt(bytes);
        let seq = self.sequence(&prompt);
        let start = bytes.below(seq.len() + 1);
        let end = start + bytes.below(seq.len() - start + 1);
        let kind = ["reasoning", "answer", "mine"][bytes.below(3)].to_owned();
        self.index
            .tag(&seq, &[Span { start, end, kind }])
            .expect("a valid span");
        let tags = self.index.tags(&seq);
        assert!(
            tags.iter()
                .all(|span| span.start < span.end && span.end <= seq.len())
        );
    }

    /// A plan that may move runs, in a scope and up to a position, and one that computes some of their tokens. Nothing
    /// is built with it: what it would copy is compared with what the slots are of.
    fn move_runs(&mut self, bytes: &mut Bytes<'_>) {
        // Mostly the text of a live request, whose blocks are there, without its beginning.
        let mut prompt = self.prompts[bytes.below(self.prompts.len())].clone();
        let mut known = session_of(&self.sequence(&prompt));
        if let Some(at) = self.pick_request(bytes) {
            let seq = &self.requests[at].seq;
            prompt.ids = seq.tokens().to_vec();
            known = session_of(seq);
            let mut spaces = self.namespaces.iter();
            let space = spaces.position(|space| space == seq.namespace());
            prompt.namespace = space.expect("a known one");
        }
        let cut = bytes.below(prompt.ids.len().min(12) + 1);
        prompt.ids.splice(..cut, vec![5; bytes.below(6)]);
        prompt.item = None;
        let mut seq = self.sequence(&prompt);
        let number = [known, known, Some(0), None][bytes.below(4)];
        let moved_end = bytes.one_in(2).then(|| bytes.below(seq.len() + 1));
        let policy = ReusePolicy {
            max_hops: [1, 0, 2, ReusePolicy::MAX_HOPS][bytes.below(4)],
            scope: [Scope::Conversation, Scope::Namespace][bytes.below(2)],
            shared_prefix: 1 + bytes.below(3),
            recompute_first: bytes.below(3),
            recompute_share: [0.0, 0.25, 0.5][bytes.below(3)],
            max_cuts: [None, Some(1)][bytes.below(2)],
            ..ReusePolicy::LAXEST
        };
        let options = PlanOptions {
            keep_last: bytes.below(3),
            pin: bytes.one_in(2),
            session: session(number),
            moved_end,
        };
        let plan = self.index.plan(&mut seq, &policy, options);
        let plan = plan.expect("a valid plan");
        self.expect_moves(&seq, &plan, &policy, number);
        let in_place = plan.blocks().len() * self.block_size;
        let mut segments = plan.segments().iter();
        let moved = |part: &&Segment| part.class == Class::Approximate && part.start >= in_place;
        let plan = if let Some(part) = segments.find(moved) {
            let start = part.start + bytes.below((part.end - part.start).min(3));
            let end = start + bytes.below(part.end - start + 1);
            let repaired = self.index.recompute(&plan, &[(start, end)]);
            let repaired = repaired.expect("tokens of a moved run");
            assert_eq!(
                repaired.num_tokens(Class::Compute),
                plan.num_tokens(Class::Compute) + end - start,
                "tokens to compute"
            );
            assert_eq!(repaired.source_blocks(), plan.source_blocks());
            self.expect_moves(&seq, &repaired, &policy, number);
            self.seen.repaired += (end - start) as u64;
            repaired
        } else {
            plan
        };
        self.index.release(&plan).expect("a live plan");
    }

    /// Every token that a plan copies is what its segment says, and moved ones are in scope.
    fn expect_moves(
        &mut self,
        seq: &TokenSequence,
        plan: &ReusePlan,
        policy: &ReusePolicy,
        number: Option<u8>,
    ) {
        let (size, truth, contents) = (self.block_size, self.truth(seq), contents(seq));
        let used: Vec<BlockId> = [plan.blocks().to_vec(), plan.source_blocks()].concat();
        let pool = (0..self.owners.len()).map(|id| BlockId(u32::try_from(id).expect("small")));
        let others: Vec<BlockId> = pool.filter(|id| !used.contains(id)).collect();
        let Some(fresh) = others.get(..plan.num_new_blocks()) else {
            return;
        };
        let table = [plan.blocks(), fresh].concat();
        for (at, &value) in truth.iter().enumerate().take(plan.blocks().len() * size) {
            let fact = self.facts[self.slot(&table, at)];
            assert_eq!(fact.prefix, value, "in place, and of another prefix");
        }
        let end = plan.moved_end().unwrap_or(seq.len());
        for copy in plan.moves(&table, 0, seq.len()).expect("a table that fits") {
            let (source, dest) = (index(copy.source_slot), index(copy.dest_slot));
            let depth = table.iter().position(|id| id.0 as usize == dest / size);
            let start = depth.expect("a block of the table") * size + dest % size;
            for offset in 0..index(copy.num_tokens) {
                let (at, slot) = (start + offset, source + offset);
                let fact = self.facts[slot];
                let holds = |part: &&Segment| (part.start..part.end).contains(&at);
                let part = plan.segments().iter().find(holds).expect("a segment");
                assert_eq!(self.owners[slot / size], Owner::Index, "nobody's source");
                assert_eq!(fact.content, contents[at], "another token");
                assert!(part.class != Class::Compute, "a copy of what is computed");
                assert!(part.class == Class::Exact || part.hops <= policy.max_hops);
                if part.class == Class::Exact {
                    assert_eq!(self.slots[slot], truth[at], "exact KV of something else");
                }
                if fact.prefix != truth[at] {
                    assert_eq!(part.class, Class::Approximate, "moved KV is approximate");
                    assert!(at < end, "a moved token at {at}, moved_end is {end}");
                    assert!(
                        policy.scope == Scope::Namespace
                            || self.is_in_scope(slot / size, &truth, policy, number),
                        "a source of another conversation"
                    );
                    self.seen.moved += 1;
                }
            }
        }
    }

    /// Whether a block may be of the conversation: its path was inserted with the session at some time, or begins as the
    /// prompt does.
    fn is_in_scope(
        &self,
        block: usize,
        truth: &[u64],
        policy: &ReusePolicy,
        number: Option<u8>,
    ) -> bool {
        let path = &self.paths[block];
        let last = path.last().copied().unwrap_or_default();
        let ends = truth.iter().skip(self.block_size - 1);
        let ends: Vec<u64> = ends.step_by(self.block_size).copied().collect();
        let common = policy.shared_prefix.min(path.len());
        let begins = ends.len() >= policy.shared_prefix && path[..common] == ends[..common];
        begins || number.is_some_and(|number| self.named.contains(&(last, number)))
    }

    // --- KV ---------------------------------------------------------------------------------------------------------

    /// The KV of every token of a sequence, computed from scratch.
    fn truth(&self, seq: &TokenSequence) -> Vec<u64> {
        let namespace = self
            .namespaces
            .iter()
            .position(|namespace| namespace == seq.namespace())
            .expect("a known one");
        let mut state = 1 + namespace as u64;
        let mut values = Vec::with_capacity(seq.len());
        for (at, &token) in seq.tokens().iter().enumerate() {
            let item = seq
                .items()
                .iter()
                .find(|item| (item.start()..item.end()).contains(&at));
            let item = item.map_or(0, |item| {
                (u64::from(item.digest()[0]) << 32) + (at - item.start()) as u64 + 1
            });
            for word in [u64::from(token), item] {
                state = (state ^ word)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .rotate_left(29)
                    >> 1;
            }
            values.push(state);
        }
        values
    }

    fn compute(&mut self, request: &mut Request, until: usize) {
        let truth = self.truth(&request.seq);
        let last = request.num_computed.checked_sub(1);
        if let Some(last) = last.filter(|_| !request.approximate) {
            assert_eq!(
                self.read(&request.table, last),
                truth[last],
                "computed on top of wrong KV"
            );
        }
        for (at, &value) in truth
            .iter()
            .enumerate()
            .take(until)
            .skip(request.num_computed)
        {
            let value = if request.approximate {
                APPROXIMATE
            } else {
                value
            };
            self.write(&request.table, at, value);
        }
        request.num_computed = until;
    }

    fn copy(&mut self, request: &Request) {
        let moves = request
            .plan
            .moves(&request.table, 0, request.seq.len())
            .expect("a table that fits");
        for one in moves {
            assert_eq!(one.delta, 0, "exact KV does not move");
            let (source, dest) = (index(one.source_slot), index(one.dest_slot));
            self.seen.copied += one.num_tokens;
            for at in 0..index(one.num_tokens) {
                assert_eq!(
                    self.owners[(source + at) / self.block_size],
                    Owner::Index,
                    "a source that nobody shares"
                );
                assert_eq!(
                    self.owners[(dest + at) / self.block_size],
                    Owner::Held,
                    "a copy into a block not held"
                );
                self.slots[dest + at] = self.slots[source + at];
            }
        }
        let exact = request.plan.segments().iter();
        for segment in exact.filter(|segment| segment.class == Class::Exact) {
            self.expect_kv_in(&request.seq, &request.table, segment.start..segment.end);
        }
    }

    fn expect_kv(&self, seq: &TokenSequence, table: &[BlockId], num_tokens: usize) {
        self.expect_kv_in(seq, table, 0..num_tokens);
    }

    fn expect_kv_in(&self, seq: &TokenSequence, table: &[BlockId], tokens: Range<usize>) {
        let truth = self.truth(seq);
        for (at, &value) in truth.iter().enumerate().take(tokens.end).skip(tokens.start) {
            assert_eq!(
                self.read(table, at),
                value,
                "the KV found at position {at} is another token's"
            );
        }
    }

    fn read(&self, table: &[BlockId], at: usize) -> u64 {
        self.slots[self.slot(table, at)]
    }

    fn write(&mut self, table: &[BlockId], at: usize, value: u64) {
        let slot = self.slot(table, at);
        assert_eq!(
            self.owners[slot / self.block_size],
            Owner::Held,
            "a write into a block that is not held"
        );
        self.slots[slot] = value;
    }

    fn slot(&self, table: &[BlockId], at: usize) -> usize {
        table[at / self.block_size].0 as usize * self.block_size + at % self.block_size
    }

    // --- who owns what ----------------------------------------------------------------------------------------------

    /// All or nothing, free blocks first; blocks evicted in vain become free.
    fn allocate(&mut self, n: usize) -> Option<Vec<BlockId>> {
        let short = n.saturating_sub(self.count(Owner::Free));
        let evicted = self.index.evict(short);
        self.give_back(&evicted);
        self.seen.evicted += evicted.len() as u64;
        if evicted.len() < short {
            self.seen.refused += 1;
            return None;
        }
        let free = (0..self.owners.len())
            .filter(|&id| self.owners[id] == Owner::Free)
            .take(n);
        let ids: Vec<_> = free
            .map(|id| BlockId(u32::try_from(id).expect("a small pool")))
            .collect();
        for id in &ids {
            self.owners[id.0 as usize] = Owner::Held;
        }
        Some(ids)
    }

    /// The index owns the blocks that it returned for the sequence, from its block `from` on.
    fn take(&mut self, done: &Inserted, seq: &TokenSequence, from: usize) {
        let (size, truth, contents) = (self.block_size, self.truth(seq), contents(seq));
        let ends = truth.iter().skip(size - 1).step_by(size);
        let path: Vec<u64> = ends.copied().take(from + done.blocks.len()).collect();
        for (depth, id) in (from..).zip(&done.blocks) {
            self.paths[id.0 as usize] = path[..=depth].to_vec();
            for offset in 0..size {
                let at = depth * size + offset;
                self.facts[id.0 as usize * size + offset] = Fact {
                    content: contents[at],
                    prefix: truth[at],
                };
            }
        }
        if let Some(session) = session_of(seq) {
            self.named.extend(path.iter().map(|&end| (end, session)));
        }
        self.seen.duplicates += done.duplicates.len() as u64;
        self.seen.replaced += done.freed.len() as u64;
        for id in &done.blocks {
            let owner = &mut self.owners[id.0 as usize];
            assert_ne!(*owner, Owner::Free, "block {id} was free");
            *owner = Owner::Index;
        }
    }

    /// The index returned these blocks.
    fn give_back(&mut self, ids: &[BlockId]) {
        for id in ids {
            let owner = &mut self.owners[id.0 as usize];
            assert_eq!(*owner, Owner::Index, "block {id} was not the index's");
            *owner = Owner::Free;
        }
    }

    fn give_back_held(&mut self, ids: &[BlockId]) {
        for id in ids {
            let owner = &mut self.owners[id.0 as usize];
            assert_eq!(*owner, Owner::Held, "block {id} was not held");
            *owner = Owner::Free;
        }
    }

    fn count(&self, owner: Owner) -> usize {
        self.owners.iter().filter(|&&found| found == owner).count()
    }

    fn check(&mut self) {
        self.index.check().expect("a well-formed index");
        let stats = self.index.stats();
        self.seen.condemned += u64::from(stats.condemned > 0);
        self.seen.holes += u64::from(stats.holes > 0);
        self.seen.approximate += u64::from(stats.approximate > 0);
        let owned = stats.indexed + stats.condemned + stats.quarantined;
        assert_eq!(
            owned,
            self.count(Owner::Index) as u64,
            "free + held + indexed + condemned + quarantined is not all"
        );
        assert_eq!(
            stats.live_plans,
            self.requests.len() as u64,
            "a live plan too many or too few"
        );
    }

    /// Quarantines a block of the index, or a free one; no call returns it afterwards.
    fn quarantine(&mut self, bytes: &mut Bytes<'_>) {
        let id = self.any_block(bytes);
        let many = self.index.quarantined().count() > self.owners.len() / 4;
        let owner = &mut self.owners[id.0 as usize];
        if many || *owner == Owner::Held {
            return;
        }
        *owner = Owner::Index;
        self.index.quarantine(&[id]).expect("an id of the pool");
    }

    fn pick_request(&self, bytes: &mut Bytes<'_>) -> Option<usize> {
        (!self.requests.is_empty()).then(|| bytes.below(self.requests.len()))
    }

    fn any_block(&self, bytes: &mut Bytes<'_>) -> BlockId {
        BlockId(u32::try_from(bytes.below(self.owners.len())).expect("a small pool"))
    }
}

/// The token of each position, and its place in an item.
fn contents(seq: &TokenSequence) -> Vec<(u32, u64)> {
    let item = |at: usize| {
        let mut items = seq.items().iter();
        let item = items.find(|item| (item.start()..item.end()).contains(&at));
        item.map_or(0, |item| {
            (u64::from(item.digest()[0]) << 32) + (at - item.start()) as u64 + 1
        })
    };
    let tokens = seq.tokens().iter().enumerate();
    tokens.map(|(at, &token)| (token, item(at))).collect()
}

/// One of three conversations, or none, by the length of a sequence.
fn session_of(seq: &TokenSequence) -> Option<u8> {
    u8::try_from(seq.len() % 4)
        .ok()
        .filter(|&number| number < 3)
}

fn session(number: Option<u8>) -> Option<SessionId> {
    number.map(|number| SessionId::new(&number.to_string()).expect("a short id"))
}

fn index(value: u64) -> usize {
    usize::try_from(value).expect("a small pool")
}

#[cfg(test)]
mod tests {
    use super::{Seen, run};

    /// 64-bit `SplitMix`, enough for bytes that look like anything.
    fn bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ (mixed >> 31)).to_le_bytes()[0]
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn random_bytes_reach_everything() {
        let mut all = Seen::default();
        for seed in 0..400 {
            let seen = run(&bytes(seed, 4_000));
            all.hits += seen.hits;
            all.copied += seen.copied;
            all.duplicates += seen.duplicates;
            all.evicted += seen.evicted;
            all.refused += seen.refused;
            all.condemned += seen.condemned;
            all.holes += seen.holes;
            all.approximate += seen.approximate;
            all.replaced += seen.replaced;
            all.epochs += seen.epochs;
            all.dead += seen.dead;
            all.removed += seen.removed;
            all.moved += seen.moved;
            all.repaired += seen.repaired;
        }
        println!("{all:#?}");
        let counts = [
            all.hits,
            all.copied,
            all.duplicates,
            all.evicted,
            all.refused,
            all.condemned,
            all.holes,
            all.approximate,
            all.replaced,
            all.epochs,
            all.dead,
            all.removed,
            all.moved,
            all.repaired,
        ];
        assert!(counts.iter().all(|&count| count > 100), "{all:#?}");
    }

    #[test]
    fn empty_input_runs() {
        assert_eq!(run(&[]), Seen::default());
    }
}
