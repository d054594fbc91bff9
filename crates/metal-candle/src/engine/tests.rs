//! The engine over a reader without a model: what follows a text is a function of all of its tokens, which it finds
//! in the blocks alone, so a block that is written, shared or given away wrongly shows in the text.

use super::*;
use crate::generate::SamplingOptions;
use crate::random::SplitMix64;
use metal_candle_kernels::attention::HOLE;
use metal_candle_kernels::host::Downloads;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

const VOCABULARY: usize = 40;
const BLOCK: usize = 4;
/// A text with this token cannot be read.
const POISON: u32 = 39;

/// What follows some tokens.
fn next(tokens: &[u32]) -> u32 {
    let mix = |sum: u64, token: &u32| SplitMix64::new(sum ^ u64::from(*token)).next_u64();
    (tokens.iter().fold(7, mix) % (VOCABULARY as u64 - 1)) as u32
}

pub(super) struct Reads {
    slots: Vec<Option<u32>>,
    /// Those of layers with a window, if there are any.
    window: Option<usize>,
    seen: Vec<Option<u32>>,
    /// Passes that fail, one in so many.
    fails: Option<u64>,
    random: SplitMix64,
    /// Texts up to so many tokens have other ropes than longer ones.
    short: usize,
    /// Tokens that are not what follows, one in so many.
    errs: Option<u64>,
    passes: Arc<Mutex<Vec<usize>>>,
    /// How many passes were read ahead, where that is done.
    ahead: Option<Arc<Mutex<usize>>>,
}

impl Reads {
    pub(super) fn new(blocks: u32) -> Self {
        Self {
            slots: vec![None; blocks as usize * BLOCK],
            window: None,
            seen: Vec::new(),
            fails: None,
            random: SplitMix64::new(1),
            short: usize::MAX,
            errs: None,
            passes: Arc::default(),
            ahead: None,
        }
    }
}

impl Reader for Reads {
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
        self.passes.lock().unwrap().push(stretches.iter().map(|it| it.tokens.len()).sum());
        if let Some(one_in) = self.fails
            && stretches.len() > 1
            && self.random.below(one_in) == 0
        {
            return Err(Error::option("device", "failed"));
        }
        let mut rows = Vec::new();
        for stretch in stretches {
            let end = stretch.start + stretch.tokens.len();
            // A piece of a prompt that is scored has the ropes of the whole.
            let is_piece = stretch.logits == 0 || stretch.logits == stretch.tokens.len();
            assert!((end > self.short) == (total > self.short) || is_piece && end < total);
            let slot_in = |table: usize, position: usize| {
                let block = stretch.tables[table][position / BLOCK];
                assert_ne!(block, HOLE);
                block as usize * BLOCK + position % BLOCK
            };
            let slot = |position| slot_in(0, position);
            for (position, token) in (stretch.start..).zip(stretch.tokens) {
                if *token == POISON {
                    return Err(Error::option("token", "is poison"));
                }
                // With other ropes, the same token has other keys.
                let ropes = if total > self.short { 1000 } else { 0 };
                self.slots[slot(position)] = Some(*token + ropes);
            }
            if let Some(window) = self.window {
                for position in stretch.start..end {
                    self.seen[slot_in(1, position)] = self.slots[slot(position)];
                }
                for position in (stretch.start + 1).saturating_sub(window)..end {
                    assert_eq!(self.seen[slot_in(1, position)], self.slots[slot(position)]);
                }
            }
            let found = (0..end).map(|position| self.slots[slot(position)].unwrap());
            for last in end - stretch.logits..end {
                let found: Vec<u32> = found
                    .clone()
                    .take(last + 1)
                    .map(|token| {
                        assert_eq!(token >= 1000, total > self.short, "keys of other ropes");
                        token % 1000
                    })
                    .collect();
                let mut chosen = next(&found) as usize;
                if self.errs.is_some_and(|one_in| self.random.below(one_in) == 0) {
                    chosen = (chosen + 1) % POISON as usize;
                }
                rows.extend((0..VOCABULARY).map(|token| if token == chosen { 9f32 } else { 0.0 }));
            }
        }
        let count = rows.len() / VOCABULARY;
        Ok(Tensor::from_vec(rows, (count, VOCABULARY), &Device::Cpu)?)
    }

    fn downloads(&self) -> Option<Downloads> {
        self.ahead.as_ref().map(|_| Downloads::new(&Device::Cpu).unwrap())
    }

    fn read_ahead(
        &mut self,
        stretches: &[Stretch],
        total: usize,
        tokens: &Tensor,
    ) -> Option<Tensor> {
        let ahead = self.ahead.clone()?;
        // As a pass that is recorded first.
        if self.random.below(3) == 0 {
            return None;
        }
        let tokens = tokens.to_vec1::<u32>().unwrap();
        assert_eq!(tokens.len(), stretches.len());
        let known: Vec<_> = stretches
            .iter()
            .zip(&tokens)
            .map(|(stretch, token)| Stretch { tokens: std::slice::from_ref(token), ..*stretch })
            .collect();
        let logits = self.read(&known, total).ok()?;
        *ahead.lock().unwrap() += 1;
        Some(logits)
    }

    fn ropes_change(&self, a: usize, b: usize) -> bool {
        (a > self.short) != (b > self.short)
    }

    fn check(&self, _: &Adapter) -> Result<()> {
        Ok(())
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }
}

fn tokenizer() -> Tokenizer {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tokenizer");
    Tokenizer::load(std::path::Path::new(folder)).unwrap()
}

pub(super) fn small() -> EngineOptions {
    EngineOptions {
        max_sequences: 6,
        max_batch_tokens: 10,
        max_waiting: 10_000,
        order: Order::Arrival,
        cache_tokens: None,
        cache_dtype: CacheDtype::Model,
        block_size: BLOCK,
        prefix_cache: true,
        draft_tokens: 0,
        draft_model: None,
        batch_invariant: false,
        turns: None,
    }
}

fn engine<'t>(
    reader: impl Reader + 'static,
    blocks: u32,
    tokenizer: &'t Tokenizer,
    options: EngineOptions,
) -> Engine<'t> {
    Engine::over(readers(reader, blocks), Some(tokenizer), options)
}

pub(super) fn readers(reader: impl Reader + 'static, blocks: u32) -> Readers {
    let layers = vec![Layers { window: None, blocks }];
    Readers { reader: Box::new(reader), drafter: None, layers, bytes: 0, keeps_ranges: false }
}

/// One with layers of the reader's window beside others, over all blocks that the reader has.
fn engine_with_window(
    reader: Reads,
    drafter: Option<Reads>,
    tokenizer: &Tokenizer,
    options: EngineOptions,
) -> Engine<'_> {
    let slots = reader.slots.len();
    let seen = vec![None; if reader.window.is_some() { slots } else { 0 }];
    let windows = std::iter::once(None).chain(reader.window.map(Some)).collect::<Vec<_>>();
    let layers = kinds(&windows, slots / BLOCK, &options).collect::<Result<_>>().unwrap();
    let reader = Box::new(Reads { seen, ..reader });
    let drafter = drafter.map(|drafter| Box::new(drafter) as Box<dyn Reader>);
    Engine::over(
        Readers { reader, drafter, layers, bytes: 0, keeps_ranges: false },
        Some(tokenizer),
        options,
    )
}

pub(super) fn request(prompt: &[u32], max_tokens: usize) -> Request {
    let options = GenerateOptions { max_tokens, ..GenerateOptions::default() };
    Request { prompt: prompt.to_vec(), options, ..Request::default() }
}

/// The tokens that follow a prompt, with the end-of-sequence token.
fn expected(tokenizer: &Tokenizer, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let mut text = prompt.to_vec();
    while text.len() < prompt.len() + max_tokens {
        let token = next(&text);
        text.push(token);
        if tokenizer.eos_ids().contains(&token) {
            break;
        }
    }
    text.split_off(prompt.len())
}

/// Checks how likely the tokens of a prompt are, by the logits that are read for them.
fn check_scores(scores: &[Scored], prompt: &[u32]) {
    let log_sum = (9f64.exp() + (VOCABULARY - 1) as f64).ln();
    let is = |found: f64, logit: f64| assert!((found - (logit - log_sum)).abs() < 1e-9, "{found}");
    assert_eq!(scores.len(), prompt.len());
    assert_eq!((scores[0].token, scores[0].logprob), (prompt[0], None));
    for place in 1..prompt.len() {
        let (scored, likeliest) = (&scores[place], next(&prompt[..place]));
        assert_eq!(scored.token, prompt[place]);
        is(scored.logprob.unwrap(), if scored.token == likeliest { 9.0 } else { 0.0 });
        let [(first, of_first), (second, of_second)] = scored.likeliest[..] else { panic!() };
        assert_eq!((first, second), (likeliest, u32::from(likeliest == 0)));
        is(of_first, 9.0);
        is(of_second, 0.0);
    }
}

/// Runs an engine until nothing is left: the tokens of every request, and how it ended.
fn run(engine: &mut Engine) -> HashMap<RequestId, (Vec<u32>, Option<Event>)> {
    let mut texts: HashMap<RequestId, (Vec<u32>, Option<Event>)> = HashMap::new();
    while !engine.is_idle() {
        for (id, event) in engine.step() {
            let (tokens, last) = texts.entry(id).or_default();
            assert!(last.is_none(), "something after the end");
            match event {
                Event::Piece(piece) => tokens.extend(piece.token),
                event => *last = Some(event),
            }
        }
    }
    texts
}

fn is_whole(engine: &Engine) {
    let Statistics { waiting, running, blocks, available_blocks, .. } = engine.statistics();
    assert_eq!((waiting, running, available_blocks), (0, 0, blocks));
    assert!(engine.blocks.is_whole());
}

#[test]
fn a_thousand_requests_that_come_and_go_leave_every_text_right_and_no_block_lost() {
    let tokenizer = tokenizer();
    let long = usize::MAX;
    for (prefix_cache, fails, short, draft_tokens, window) in [
        (true, None, long, 0, None),
        (false, None, long, 0, None),
        (true, Some(5), 20, 0, None),
        (false, None, 9, 0, None),
        (true, None, long, 3, None),
        (true, Some(5), 20, 4, None),
        (false, Some(9), 9, 2, None),
        (true, None, long, 0, Some(3)),
        (true, Some(5), 20, 0, Some(9)),
        (false, Some(9), 9, 0, Some(1)),
    ] {
        let blocks = 17;
        let reader = Reads { fails, short, window, ..Reads::new(blocks) };
        let passes = reader.passes.clone();
        let drafter = Reads { errs: Some(4), fails, short, ..Reads::new(blocks) };
        let drafter = (draft_tokens > 0).then_some(drafter);
        let order = if fails.is_some() { Order::Longest } else { Order::Arrival };
        let options = EngineOptions { prefix_cache, draft_tokens, order, ..small() };
        let mut engine = engine_with_window(reader, drafter, &tokenizer, options);
        let mut random = SplitMix64::new(3);
        let mut wanted: HashMap<RequestId, (Vec<u32>, usize)> = HashMap::new();
        let mut texts: HashMap<RequestId, Vec<u32>> = HashMap::new();
        let (mut submitted, mut ended, mut reused, mut cancelled, mut poisoned) = (0, 0, 0, 0, 0);
        let mut scored = 0;
        while submitted < 1000 || !engine.is_idle() {
            while submitted < 1000 && random.below(3) > 0 {
                // Few beginnings, of which many are shared.
                let kind = random.below(4) as u32;
                let mut prompt: Vec<u32> =
                    (0..random.below(14) as u32).map(|i| (i * 5 + kind) % 30).collect();
                prompt.extend((0..1 + random.below(12)).map(|_| random.below(38) as u32));
                if random.below(50) == 0 {
                    prompt.push(POISON);
                }
                let max_tokens = 1 + random.below(30) as usize;
                let priority = random.below(3) as i32;
                let score_prompt = random.below(8) == 0;
                let mut request =
                    Request { priority, score_prompt, ..request(&prompt, max_tokens) };
                request.options.top_logprobs = 2;
                wanted.insert(engine.submit(request).unwrap(), (prompt, max_tokens));
                submitted += 1;
            }
            if random.below(10) == 0
                && let Some(id) = wanted.keys().min().copied()
            {
                assert!(engine.cancel(id) && !engine.cancel(id));
                wanted.remove(&id);
                cancelled += 1;
            }
            for (id, event) in engine.step() {
                let (prompt, max_tokens) =
                    wanted.get(&id).expect("an event of a request that is gone");
                match event {
                    Event::Prompt(scores) => {
                        assert!(!texts.contains_key(&id), "scores after a piece");
                        check_scores(&scores, prompt);
                        scored += 1;
                    }
                    Event::Piece(piece) => {
                        assert_eq!(piece.likeliest[0].0, piece.token.unwrap());
                        assert_eq!(piece.likeliest.len(), 2);
                        texts.entry(id).or_default().extend(piece.token);
                    }
                    Event::Finished(finished) => {
                        let text = texts.remove(&id).unwrap();
                        assert_eq!(text, expected(&tokenizer, prompt, *max_tokens));
                        assert_eq!(finished.prompt_tokens, prompt.len());
                        reused += finished.cached_tokens;
                        ended += 1;
                        wanted.remove(&id);
                    }
                    Event::Failed(error) => {
                        assert!(prompt.contains(&POISON), "{error}");
                        assert!(error.to_string().contains("poison"), "{error}");
                        wanted.remove(&id);
                        poisoned += 1;
                    }
                }
            }
        }
        is_whole(&engine);
        assert!(wanted.is_empty());
        assert_eq!(ended + cancelled + poisoned, 1000);
        assert!(ended > 500 && cancelled > 50 && poisoned > 5, "{ended} {cancelled} {poisoned}");
        assert!(scored > 50, "{scored}");
        assert!(engine.statistics().preemptions > 10, "{:?}", engine.statistics());
        assert_eq!(reused > 100, prefix_cache, "{reused}");
        let Statistics { drafted, accepted, .. } = engine.statistics();
        assert_eq!(drafted > 50 && accepted > 20, draft_tokens > 0, "{accepted} of {drafted}");
        assert!(accepted < drafted || drafted == 0);
        assert!(passes.lock().unwrap().iter().all(|tokens| *tokens <= 10));
    }
}

#[test]
fn texts_whose_tokens_are_read_before_they_are_known_are_right() {
    let tokenizer = tokenizer();
    for (fails, short, window, prefix_cache) in [
        (None, usize::MAX, None, true),
        (Some(5), usize::MAX, None, false),
        (Some(7), 20, Some(3), true),
        (None, 9, Some(1), false),
    ] {
        let ahead = Arc::new(Mutex::new(0));
        let reader = Reads { fails, short, window, ahead: Some(ahead.clone()), ..Reads::new(17) };
        let options = EngineOptions { prefix_cache, ..small() };
        let mut engine = engine_with_window(reader, None, &tokenizer, options);
        let mut random = SplitMix64::new(9);
        let mut wanted: HashMap<RequestId, (Vec<u32>, usize)> = HashMap::new();
        let mut texts: HashMap<RequestId, Vec<u32>> = HashMap::new();
        let (mut submitted, mut ended, mut cancelled) = (0, 0, 0);
        while submitted < 400 || !engine.is_idle() {
            // Few at once, so that most steps have none that waits, and sometimes many.
            let count = if random.below(200) == 0 { 9 } else { u64::from(random.below(14) == 0) };
            for _ in 0..if submitted < 400 { count } else { 0 } {
                let prompt: Vec<u32> =
                    (0..1 + random.below(12)).map(|_| random.below(38) as u32).collect();
                let max_tokens = 1 + random.below(30) as usize;
                let priority = random.below(3) as i32;
                // The host has a part in these.
                let score_prompt = random.below(12) == 0;
                let mut request =
                    Request { priority, score_prompt, ..request(&prompt, max_tokens) };
                request.options.top_logprobs = if score_prompt { 2 } else { 0 };
                wanted.insert(engine.submit(request).unwrap(), (prompt, max_tokens));
                submitted += 1;
            }
            if random.below(20) == 0
                && let Some(id) = wanted.keys().min().copied()
            {
                assert!(engine.cancel(id));
                wanted.remove(&id);
                cancelled += 1;
            }
            for (id, event) in engine.step() {
                let (prompt, max_tokens) =
                    wanted.get(&id).expect("an event of a request that is gone");
                match event {
                    Event::Prompt(scores) => check_scores(&scores, prompt),
                    Event::Piece(piece) => texts.entry(id).or_default().extend(piece.token),
                    Event::Finished(_) => {
                        let text = texts.remove(&id).unwrap();
                        assert_eq!(text, expected(&tokenizer, prompt, *max_tokens));
                        ended += 1;
                        wanted.remove(&id);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        is_whole(&engine);
        assert_eq!(ended + cancelled, submitted);
        assert!(cancelled > 20 && engine.statistics().preemptions > 0, "{cancelled}");
        let ahead = *ahead.lock().unwrap();
        assert!(ahead > 200, "{ahead}");
        // Of those that failed afterwards nothing was kept.
        let kept = engine.statistics().read_ahead;
        assert!(kept <= ahead as u64 && 2 * kept > ahead as u64, "{kept} of {ahead}");
    }
}

#[test]
fn many_samples_of_one_prompt_read_its_blocks_once() {
    let tokenizer = tokenizer();
    let reader = Reads::new(64);
    let passes = reader.passes.clone();
    let mut engine = engine(reader, 64, &tokenizer, small());
    let prompt: Vec<u32> = (0..35).collect();
    // All at once, and again when all have ended.
    for (count, read) in [(6, 35 + 5 * 3), (5, 5 * 3)] {
        for _ in 0..count {
            engine.submit(request(&prompt, 1)).unwrap();
        }
        let mut found = 0;
        for (tokens, last) in run(&mut engine).into_values() {
            assert_eq!(tokens, expected(&tokenizer, &prompt, 1));
            let Some(Event::Finished(finished)) = last else { panic!("{last:?}") };
            found += finished.cached_tokens;
        }
        assert_eq!(found, 5 * 32);
        assert_eq!(passes.lock().unwrap().drain(..).sum::<usize>(), read);
    }
}

#[test]
fn those_with_more_priority_and_those_that_came_first_go_first() {
    let tokenizer = tokenizer();
    let options = EngineOptions { max_sequences: 1, ..small() };
    let mut engine = engine(Reads::new(20), 20, &tokenizer, options);
    let ids: Vec<RequestId> = [0, 0, 5, -1, 5]
        .into_iter()
        .map(|priority| engine.submit(Request { priority, ..request(&[1], 1) }).unwrap())
        .collect();
    let mut order = Vec::new();
    while !engine.is_idle() {
        for (id, event) in engine.step() {
            if let Event::Finished(_) = event {
                order.push(ids.iter().position(|other| *other == id).unwrap());
            }
        }
    }
    assert_eq!(order, [2, 4, 0, 1, 3]);
}

/// A request that writes so many tokens, whatever they are.
fn long(tokens: usize) -> Request {
    let mut request = request(&[1], tokens);
    request.options.ignore_eos = true;
    request
}

/// Runs an engine until nothing is left: how many texts there were at once in each step, and in what order they ended, by
/// their places among `ids`.
fn run_in_order(engine: &mut Engine, ids: &[RequestId]) -> (Vec<usize>, Vec<usize>) {
    let (mut at_once, mut ended) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        let events = engine.step();
        at_once.push(events.iter().filter(|(_, it)| matches!(it, Event::Piece(_))).count());
        let last = events.iter().filter(|(_, it)| matches!(it, Event::Finished(_)));
        ended.extend(last.filter_map(|(id, _)| ids.iter().position(|other| other == id)));
    }
    (at_once, ended)
}

#[test]
fn those_that_may_write_the_most_go_first_and_the_others_end_with_them() {
    let tokenizer = tokenizer();
    let run = |lengths: &[usize], max_sequences: usize, priorities: &[i32]| {
        let options = EngineOptions { order: Order::Longest, max_sequences, ..small() };
        let mut engine = engine(Reads::new(64), 64, &tokenizer, options);
        let ids: Vec<RequestId> = lengths
            .iter()
            .zip(priorities.iter().chain(std::iter::repeat(&0)))
            .map(|(&tokens, &priority)| {
                engine.submit(Request { priority, ..long(tokens) }).unwrap()
            })
            .collect();
        let run = run_in_order(&mut engine, &ids);
        is_whole(&engine);
        run
    };
    assert_eq!(run(&[2, 9, 5, 9], 1, &[]).1, [1, 3, 2, 0]);
    assert_eq!(run(&[2, 9, 5, 9], 1, &[1]).1, [0, 1, 3, 2]);
    // A second place is enough for the others while the first is written, and those as long as it have their own.
    assert_eq!(run(&[2, 2, 12, 2, 2, 2, 2], 6, &[]).0, [2; 12]);
    assert_eq!(run(&[2, 12, 2, 2, 12, 2, 2, 2], 6, &[]).0, [3; 12]);
    assert_eq!(run(&[8; 5], 6, &[]).0, [5; 8]);
    // Two of 7 don't fit behind each other into 12, and a place stays empty rather than being left for the end.
    assert_eq!(run(&[12, 7, 7], 6, &[]).0, [3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1]);
}

#[test]
fn one_that_may_end_after_all_others_does_not_wait_for_a_place_of_theirs() {
    let tokenizer = tokenizer();
    let options = EngineOptions { order: Order::Longest, ..small() };
    let mut engine = engine(Reads::new(64), 64, &tokenizer, options);
    for tokens in [12, 8, 8] {
        engine.submit(long(tokens)).unwrap();
    }
    for _ in 0..7 {
        engine.step();
    }
    // Of these three 5, 1 and 1 are left, so that two places are empty for 4 steps each.
    engine.submit(long(6)).unwrap();
    assert_eq!(engine.step().iter().filter(|(_, it)| matches!(it, Event::Piece(_))).count(), 4);
    assert_eq!(run_in_order(&mut engine, &[]).0, [2, 2, 2, 2, 1]);
    is_whole(&engine);
}

#[test]
fn tokens_are_read_ahead_while_others_wait_for_a_place() {
    let tokenizer = tokenizer();
    let ahead = Arc::new(Mutex::new(0));
    let reader = Reads { ahead: Some(ahead.clone()), ..Reads::new(64) };
    let options = EngineOptions { max_sequences: 2, ..small() };
    let mut engine = engine(reader, 64, &tokenizer, options);
    let ids: Vec<RequestId> = (0..6).map(|_| engine.submit(long(10)).unwrap()).collect();
    // The last two are begun when those before have ended, and not a step later.
    assert_eq!(run_in_order(&mut engine, &ids), (vec![2; 30], vec![0, 1, 2, 3, 4, 5]));
    // The last two have 9 such steps, of which the reader takes two of three.
    assert!(*ahead.lock().unwrap() > 9, "{ahead:?}");
    is_whole(&engine);
}

#[test]
fn a_prompt_is_read_in_pieces_beside_texts_that_are_written() {
    let tokenizer = tokenizer();
    let reader = Reads::new(64);
    let passes = reader.passes.clone();
    let mut engine = engine(reader, 64, &tokenizer, small());
    let short = engine.submit(request(&[3, 1], 12)).unwrap();
    engine.step();
    let long: Vec<u32> = (0..38).collect();
    engine.submit(request(&long, 1)).unwrap();
    for _ in 0..4 {
        let events = engine.step();
        assert!(events.iter().any(|(id, _)| *id == short), "the first text stood still");
    }
    // One token of the first text, and nine of the other.
    assert_eq!(*passes.lock().unwrap(), [2, 10, 10, 10, 10]);
    run(&mut engine);
    is_whole(&engine);
}

#[test]
fn what_cannot_be_written_is_refused_when_it_comes() {
    let tokenizer = tokenizer();
    let options = EngineOptions { max_waiting: 2, ..small() };
    let mut engine = engine(Reads::new(5), 5, &tokenizer, options);
    let mut refused = |request: Request| engine.submit(request).unwrap_err().to_string();
    let error = refused(request(&[], 1));
    assert!(error.contains("prompt: is empty"), "{error}");
    let error = refused(request(&[1, 40], 1));
    assert!(error.contains("has token 40, but the model's vocabulary has 40"), "{error}");
    let error = refused(request(&[1], 20));
    assert!(
        error.contains("max_tokens: is 20 after a prompt of 1, and the cache has room for 20"),
        "{error}"
    );
    let mut wrong = request(&[1], 1);
    wrong.options.sampling = SamplingOptions { temperature: -1.0, ..SamplingOptions::default() };
    assert!(refused(wrong).contains("temperature"));
    for _ in 0..2 {
        engine.submit(request(&[1], 19)).unwrap();
    }
    let error = engine.submit(request(&[1], 1)).unwrap_err().to_string();
    assert!(error.contains("2 requests wait already"), "{error}");
    // What goes with one that was taken isn't refused for that, but for all else.
    let follows = |request| Request { follows: true, ..request };
    let id = engine.submit(follows(request(&[1], 1))).unwrap();
    let error = engine.submit(follows(request(&[], 1))).unwrap_err().to_string();
    assert!(error.contains("prompt: is empty"), "{error}");
    assert!(matches!(run(&mut engine)[&id], (_, Some(Event::Finished(_)))));
}

#[test]
fn an_engine_that_waits_for_its_turn_lives_and_says_what_it_has_to_do() {
    let turns = Turns::new(0.5);
    let options = EngineOptions { turns: Some(turns.clone()), ..small() };
    let handle = Handle::over(readers(Reads::new(5), 5), None, options).unwrap();
    let turn = turns.hold();
    let mut answers = handle.submit(request(&[1, 2], 3));
    let waiting = || handle.statistics_within(Duration::from_millis(1)).unwrap().waiting;
    while waiting() == 0 {}
    assert!(handle.is_alive());
    drop(turn);
    assert_eq!(
        answers.by_ref().map(|piece| piece.unwrap()).filter(|it| it.token.is_some()).count(),
        3
    );
    assert_eq!(handle.statistics().unwrap().waiting, 0);
}

#[test]
fn an_engine_whose_thread_panics_lives_no_more() {
    // Its reader has no slots to write to.
    let handle = Handle::over(readers(Reads::new(0), 5), None, small()).unwrap();
    assert!(handle.is_alive());
    let mut answers = handle.submit(request(&[1], 1));
    assert!(answers.next().unwrap().is_err());
    assert!(!handle.is_alive());
    assert!(handle.statistics().is_err() && handle.statistics_within(Duration::ZERO).is_err());
}

#[test]
fn guesses_that_are_right_save_passes() {
    let tokenizer = tokenizer();
    let prompt = [5, 3, 1];
    let passes_with = |draft_tokens: usize, errs: Option<u64>, max_sequences: usize| {
        let reader = Reads::new(64);
        let passes = reader.passes.clone();
        let drafter = Box::new(Reads { errs, ..Reads::new(64) });
        let readers = Readers {
            reader: Box::new(reader),
            drafter: Some(drafter),
            layers: vec![Layers { window: None, blocks: 64 }],
            bytes: 0,
            keeps_ranges: false,
        };
        let options =
            EngineOptions { draft_tokens, max_sequences, max_batch_tokens: 20, ..small() };
        let mut engine = Engine::over(readers, Some(&tokenizer), options);
        let mut wanted = request(&prompt, 17);
        wanted.options.ignore_eos = true;
        let id = engine.submit(wanted).unwrap();
        let mut texts = run(&mut engine);
        let (tokens, last) = texts.remove(&id).unwrap();
        assert!(matches!(last, Some(Event::Finished(_))), "{last:?}");
        let mut text = prompt.to_vec();
        (0..17).for_each(|_| text.push(next(&text)));
        assert_eq!(tokens, text[3..]);
        is_whole(&engine);
        let Statistics { drafted, accepted, .. } = engine.statistics();
        let count = passes.lock().unwrap().len();
        (count, drafted, accepted)
    };
    assert_eq!(passes_with(0, None, 1), (17, 0, 0));
    // The prompt, and four passes of four tokens each.
    assert_eq!(passes_with(3, None, 1), (5, 12, 12));
    // No more than the text may have.
    assert_eq!(passes_with(9, None, 1), (3, 14, 14));
    assert_eq!(passes_with(3, Some(1), 1).0, 17);
}

#[test]
fn options_that_cannot_work_are_refused() {
    let check = |options: EngineOptions| options.validate().map_err(|error| error.to_string());
    assert!(check(EngineOptions::default()).is_ok());
    for (options, word) in [
        (EngineOptions { max_sequences: 0, ..small() }, "max_sequences"),
        (
            EngineOptions { max_batch_tokens: 5, ..small() },
            "max_batch_tokens: is 5, expected at least 6",
        ),
        (EngineOptions { max_waiting: 0, ..small() }, "max_waiting"),
        (EngineOptions { block_size: 0, ..small() }, "block_size"),
        (EngineOptions { draft_tokens: 64, ..small() }, "draft_tokens"),
        (
            EngineOptions { cache_tokens: Some(3), ..small() },
            "cache_tokens: is 3, expected at least 4",
        ),
    ] {
        let error = check(options).unwrap_err();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn logits_that_are_not_numbers_end_one_text_alone() {
    struct Broken(Reads);
    impl Reader for Broken {
        fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
            let logits = self.0.read(stretches, total)?;
            let rows =
                stretches.iter().map(|it| if it.tokens.contains(&17) { f32::NAN } else { 0.0 });
            let rows = Tensor::from_iter(rows, &Device::Cpu)?.unsqueeze(1)?;
            Ok(logits.broadcast_add(&rows)?)
        }
        fn ropes_change(&self, a: usize, b: usize) -> bool {
            self.0.ropes_change(a, b)
        }
        fn check(&self, adapter: &Adapter) -> Result<()> {
            self.0.check(adapter)
        }
        fn vocabulary(&self) -> usize {
            VOCABULARY
        }
    }
    let tokenizer = tokenizer();
    let mut engine = engine(Broken(Reads::new(20)), 20, &tokenizer, small());
    let good = engine.submit(request(&[1, 2], 1)).unwrap();
    let bad = engine.submit(request(&[17], 1)).unwrap();
    let mut texts = run(&mut engine);
    assert!(
        matches!(texts.remove(&good), Some((tokens, Some(Event::Finished(_)))) if tokens.len() == 1)
    );
    let Some((_, Some(Event::Failed(error)))) = texts.remove(&bad) else { panic!("it went on") };
    assert!(error.to_string().contains("the logit of token 0 is NaN"), "{error}");
    is_whole(&engine);
}

/// Other systems don't say how much memory is free.
#[cfg(target_os = "linux")]
#[test]
fn a_cache_that_is_larger_than_the_memory_is_refused() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo/base");
    let model = Arc::new(Model::load(&folder, candle_core::DType::F32, &Device::Cpu).unwrap());
    let options =
        EngineOptions { cache_tokens: Some(99_999_999_999_999), ..EngineOptions::default() };
    let error = Engine::new(&model, None, options).err().unwrap().to_string();
    assert!(error.starts_with("cache_tokens: is 99999999999999, for which"), "{error}");
}
