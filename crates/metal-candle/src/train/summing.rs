//! The sum of all ranks' gradients, whose parts are begun while the backward pass goes on.
//!
//! A backward pass goes through the layers from the last to the first. Once it gives the gradient of a layer's parameter,
//! those of all later layers and of the head are complete, and can be added up beside what is left of it. The parts are
//! the same in every run, and begun in the same order by all ranks, also by one that has no rows.
//!
//! The embedding comes last, and is large, but a pass reads few of its rows: the ranks give each other the gradients of
//! those, and each adds them up.

use super::gradients::Gradients;
use crate::Result;
use crate::adapter::Entry;
use crate::autograd::{GradientSink, ParameterId, TableGradient};
use crate::data::Batch;
use crate::parallel::{Group, elsewhere};
use candle_core::{DType, Tensor};
use metal_candle_kernels::{copy, embedding};
use std::ops::Range;

const WHAT: &str = "the gradients of a step";
/// Elements that are worth a sum of their own, 192 MiB: it takes some of the GPU from the work beside it, also while it
/// waits for another rank.
const SMALLEST: usize = 48 << 20;

/// A part of the gradients.
#[derive(Debug, PartialEq)]
struct Piece {
    range: Range<usize>,
    /// It is complete once the backward pass has come below this layer; `None` once it is over.
    layer: Option<usize>,
}

/// Of what belongs to the head: above all layers.
const ABOVE: Option<usize> = Some(usize::MAX);

/// Which parameters the embedding and the head are, where every weight of them is trained.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tables {
    pub embedding: Option<ParameterId>,
    /// The embedding's, where it is the head.
    pub head: Option<ParameterId>,
}

/// The rows of the embedding that the last pass of the step reads.
#[derive(Debug)]
struct LastRows {
    id: ParameterId,
    /// Those of all ranks, by rank.
    ids: Vec<u32>,
    /// Which of them are those of each.
    parts: Vec<Range<usize>>,
    /// This rank's gradients, `(batch, seq, hidden)`.
    mine: Option<Tensor>,
    /// Those of all, a flat buffer.
    all: Option<Tensor>,
}

/// The gradients of a step while they are summed.
pub(super) struct Summing<'a> {
    gradients: &'a Gradients,
    group: Group<'a>,
    tables: Tables,
    /// Parts of at least so many elements are begun early; nothing is without it.
    smallest: Option<usize>,
    /// Whether a step is one pass of each rank.
    single_pass: bool,
    pieces: Vec<Piece>,
    rows: Option<LastRows>,
    begun: usize,
    /// Whether what comes now is added to what is there for the last time in this step.
    is_last_pass: bool,
    is_finished: bool,
}

impl<'a> Summing<'a> {
    /// Of a step of `passes`, at most, of each rank. Parts are begun early where the group can do that and `beside` is
    /// true.
    pub fn new(
        gradients: &'a Gradients,
        group: Group<'a>,
        tables: Tables,
        passes: usize,
        beside: bool,
    ) -> Self {
        let smallest = (beside && group.sums_beside_work()).then_some(SMALLEST);
        Self {
            gradients,
            group,
            tables,
            smallest,
            single_pass: passes == 1,
            pieces: Vec::new(),
            rows: None,
            begun: 0,
            is_last_pass: false,
            is_finished: false,
        }
    }

    /// Whether sums are begun before it is known what the step came to.
    pub fn is_early(&self) -> bool {
        self.smallest.is_some() || self.gradients.are_in_parts()
    }

    /// That the backward pass which follows, over this batch, is this rank's last of the step.
    pub fn last_pass(&mut self, batch: &Batch) -> Result<()> {
        self.plan(&batch.input_ids)
    }

    /// That this rank's passes are over.
    pub fn passes_are_over(&mut self) -> Result<()> {
        if !self.is_last_pass {
            self.plan(&[])?;
        }
        if self.is_early() {
            self.begin_all()?;
        }
        self.gradients.settle()
    }

    /// What is begun when, now that it is known which rows of the embedding the last pass reads.
    fn plan(&mut self, ids: &[u32]) -> Result<()> {
        self.is_last_pass = true;
        let entries = self.gradients.entries();
        let Some(smallest) = self.smallest else {
            self.pieces = vec![Piece { range: self.gradients.unsummed(), layer: None }];
            return Ok(());
        };
        self.rows = self.last_rows(ids)?;
        let Tables { embedding, head } = self.tables;
        let by_rows = self.rows.is_some();
        let tables = [embedding, head].into_iter().flatten();
        let place = Place {
            // The embedding's last gradients are those of its rows.
            above: tables.filter(|id| by_rows || Some(*id) != embedding).collect(),
            // It may have no others.
            left_out: embedding.filter(|_| by_rows && self.single_pass && head != embedding),
        };
        self.pieces = pieces(entries, smallest, &place);
        Ok(())
    }

    /// The rows of all ranks, unless they are more than the embedding has.
    fn last_rows(&self, ids: &[u32]) -> Result<Option<LastRows>> {
        const WHAT: &str = "the rows of the embedding";
        let Some(id) = self.tables.embedding else { return Ok(None) };
        let (mut all, mut parts) = (Vec::new(), Vec::new());
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        for (rank, ids) in self.group.gather(WHAT, &bytes)?.into_iter().enumerate() {
            let (ids, rest) = ids.as_chunks::<4>();
            if !rest.is_empty() {
                return Err(elsewhere(rank, WHAT));
            }
            parts.push(all.len()..all.len() + ids.len());
            all.extend(ids.iter().map(|id| u32::from_le_bytes(*id)));
        }
        let (height, _) = self.gradients.view(id)?.dims2()?;
        let few = all.len() <= height;
        Ok(few.then_some(LastRows { id, ids: all, parts, mine: None, all: None }))
    }

    /// Begins the parts that are complete once the backward pass is at this layer.
    fn begin_above(&mut self, layer: usize) -> Result<()> {
        while self.waits_for().is_some_and(|complete| complete > layer) {
            self.begin()?;
        }
        Ok(())
    }

    /// The layer of the next part, if that can be begun before the pass is over.
    fn waits_for(&self) -> Option<usize> {
        self.pieces.get(self.begun)?.layer
    }

    fn begin(&mut self) -> Result<()> {
        let Range { start, end } = self.pieces[self.begun].range;
        self.begun += 1;
        self.group.begin_sum(WHAT, &self.gradients.buffer().narrow(0, start, end - start)?)
    }

    /// Begins what isn't begun: the parts first, some of which a rank with rows has begun before.
    fn begin_all(&mut self) -> Result<()> {
        while self.begun < self.pieces.len() {
            self.begin()?;
        }
        let (buffer, group) = (self.gradients.buffer(), self.group);
        if let Some(rows) = self.rows.as_mut().filter(|rows| rows.all.is_none()) {
            let (_, hidden) = self.gradients.view(rows.id)?.dims2()?;
            let parts: Vec<Range<usize>> =
                rows.parts.iter().map(|part| part.start * hidden..part.end * hidden).collect();
            let all = Tensor::zeros(rows.ids.len() * hidden, DType::F32, buffer.device())?;
            if let Some(mine) = &rows.mine {
                copy::write(&all, &mine.flatten_all()?, 0, parts[group.rank()].start)?;
            }
            let all = rows.all.insert(all);
            group.begin_spread(WHAT, all, &parts)?;
        }
        Ok(())
    }

    /// The sums, once all passes are over.
    pub fn finish(&mut self) -> Result<()> {
        self.begin_all()?;
        self.is_finished = true;
        self.group.end_begun(WHAT)?;
        let Some(LastRows { id, ids, all: Some(all), .. }) = self.rows.take() else {
            return Ok(());
        };
        let (count, gradient) = (ids.len(), self.gradients.view(id)?);
        let ids = Tensor::from_vec(ids, (1, count), all.device())?;
        let rows = all.reshape((1, count, gradient.dim(1)?))?;
        Ok(embedding::accumulate(&gradient, &rows, &ids)?)
    }
}

impl Drop for Summing<'_> {
    /// After an error of something else, nobody else writes to the gradients: what was begun is done, or, where a rank is
    /// lost, given up. That error is told already.
    fn drop(&mut self) {
        let rows = self.rows.as_ref().is_some_and(|rows| rows.all.is_some());
        if (rows || self.begun > 0) && !self.is_finished {
            let _ = self.group.end_begun(WHAT);
        }
    }
}

impl GradientSink for Summing<'_> {
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        if self.is_last_pass
            && self.waits_for().is_some()
            && let Some(layer) = self.gradients.entries().get(id.0).and_then(layer_of)
        {
            self.begin_above(layer)?;
        }
        (&mut &*self.gradients).accept(id, gradient)
    }

    fn accept_all(&mut self, gradients: Vec<(ParameterId, Tensor)>) -> Result<()> {
        match self.is_last_pass && self.waits_for().is_some() {
            true => gradients.into_iter().try_for_each(|(id, gradient)| self.accept(id, gradient)),
            false => (&mut &*self.gradients).accept_all(gradients),
        }
    }

    fn accept_rows(&mut self, id: ParameterId, gradient: TableGradient) -> Result<()> {
        let Some(rows) = self.rows.as_mut().filter(|rows| rows.id == id) else {
            return (&mut &*self.gradients).accept_rows(id, gradient);
        };
        let (found, expected) = (gradient.ids.elem_count(), rows.parts[self.group.rank()].len());
        if rows.mine.is_some() || found != expected {
            return Err(candle_core::Error::msg(format!(
                "the last pass of a step read {found} rows of the embedding, expected {expected}, once"
            ))
            .into());
        }
        rows.mine = Some(copy::cast(&gradient.rows, DType::F32)?);
        Ok(())
    }
}

/// The layer whose matrix this is.
fn layer_of(entry: &Entry) -> Option<usize> {
    let mut path = entry.name.split('.');
    path.find(|part| *part == "layers")?;
    path.next()?.parse().ok().filter(|_| entry.shape.rank() >= 2)
}

/// What is said of parameters whose names say no layer.
#[derive(Debug, Default)]
struct Place {
    /// Complete before all layers.
    above: Vec<ParameterId>,
    /// Without a gradient.
    left_out: Option<ParameterId>,
}

/// All gradients in parts: the head, neighbouring matrices of the last layers, then of those before them, then what belongs
/// to no layer, and vectors, which are small.
fn pieces(entries: &[Entry], smallest: usize, place: &Place) -> Vec<Piece> {
    let mut of_layers: Vec<Piece> = Vec::new();
    let mut rest: Vec<Piece> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let id = ParameterId(index);
        let Range { start, end } = entry.range();
        if start == end || place.left_out == Some(id) {
            continue;
        }
        let layer = if place.above.contains(&id) { ABOVE } else { layer_of(entry) };
        let pieces = if layer.is_some() { &mut of_layers } else { &mut rest };
        match pieces.last_mut() {
            Some(last) if last.layer == layer && last.range.end == start => last.range.end = end,
            _ => pieces.push(Piece { range: start..end, layer }),
        }
    }
    // From the end of each run of neighbours, which are the last layers there.
    let mut pieces: Vec<Piece> = Vec::new();
    for piece in of_layers.into_iter().rev() {
        match pieces.last_mut() {
            Some(last)
                if last.range.start == piece.range.end
                    && last.layer >= piece.layer
                    && last.range.len() < smallest =>
            {
                (last.range.start, last.layer) = (piece.range.start, piece.layer);
            }
            _ => pieces.push(piece),
        }
    }
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.layer));
    pieces.extend(rest);
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{Adapter, LoraConfig};
    use crate::autograd::Tape;
    use crate::data::Batch;
    use crate::model::{Config, Model};
    use crate::parallel::Collectives;
    use candle_core::{DType, Device};
    use serde_json::json;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex, MutexGuard};

    /// Two ranks of which the other gives nothing: sums are what they were when they were begun.
    #[derive(Debug, Default)]
    struct Witness(Mutex<Vec<Vec<f32>>>, AtomicUsize);

    impl Witness {
        fn sums(&self) -> MutexGuard<'_, Vec<Vec<f32>>> {
            self.0.lock().unwrap()
        }
    }

    impl Collectives for Witness {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            2
        }

        fn gather(&self, _: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
            Ok(vec![mine.to_vec(), Vec::new()])
        }

        fn sum(&self, _: &'static str, buffer: &Tensor) -> Result<()> {
            self.sums().push(buffer.to_vec1()?);
            Ok(())
        }

        fn spread(&self, _: &'static str, _: &Tensor, _: &[Range<usize>]) -> Result<()> {
            Ok(())
        }

        fn takes(&self, _: &Device) -> bool {
            true
        }

        fn sums_beside_work(&self) -> bool {
            true
        }

        fn end_begun(&self, _: &'static str) -> Result<()> {
            self.1.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    fn model(tied: bool) -> Model {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 16, "tie_word_embeddings": tied,
        });
        let config = Config::from_json(&config.to_string()).unwrap();
        Model::random(config, DType::F32, &Device::Cpu, 5).unwrap()
    }

    fn batch(rows: usize) -> Batch {
        Batch {
            rows,
            length: 6,
            input_ids: [3, 1, 4, 1, 5, 9].repeat(rows),
            targets: [1, 4, 1, 5, 9, 2].repeat(rows),
            positions: (0..6).collect::<Vec<u32>>().repeat(rows),
            first_key: vec![0; 6 * rows],
            tokens: 6 * rows,
            target_tokens: 6 * rows,
            ..Batch::default()
        }
    }

    #[test]
    fn sums_that_were_begun_are_waited_for_whatever_comes_between() {
        let model = model(false);
        let adapter = Adapter::new(&model, &LoraConfig::default(), 1).unwrap();
        let gradients = Gradients::new(adapter.parameters()).unwrap();
        for (begins, finishes, waits) in [(false, false, 0), (true, false, 1), (true, true, 1)] {
            let witness = Witness::default();
            let group = Group::new(&witness);
            let mut sums = Summing::new(&gradients, group, Tables::default(), 1, true);
            sums.smallest = Some(1);
            sums.last_pass(&batch(1)).unwrap();
            if begins {
                sums.begin_above(2).unwrap();
                assert_eq!(witness.sums().len(), 1);
            }
            if finishes {
                sums.finish().unwrap();
            }
            drop(sums);
            assert_eq!(witness.1.load(Ordering::Relaxed), waits);
        }
    }

    #[test]
    fn a_part_is_complete_when_its_sum_begins() {
        for tied in [false, true] {
            for every_weight in [false, true] {
                for passes in [1, 2] {
                    // 24 rows are more than the embedding has.
                    for rows in [1, 4] {
                        parts_are_complete(tied, every_weight, passes, &batch(rows));
                    }
                }
            }
        }
    }

    fn parts_are_complete(tied: bool, every_weight: bool, passes: usize, batch: &Batch) {
        let model = model(tied);
        let (model, adapter) = match every_weight {
            true => {
                let adapter = Adapter::full(&model).unwrap();
                (model.without_weights(), adapter)
            }
            false => {
                let adapter = Adapter::new(&model, &LoraConfig::default(), 1).unwrap();
                (model, adapter)
            }
        };
        let adapter = Arc::new(adapter);
        let pass = |sink: &mut dyn GradientSink| {
            let tape = Tape::training().with_checkpointing(tied);
            let loss = model.loss(&tape, batch, Some(&adapter)).unwrap().sum;
            tape.backward(&loss, 1.0, sink).unwrap();
        };
        let expected = Gradients::new(adapter.parameters()).unwrap();
        (0..passes).for_each(|_| pass(&mut &expected));
        let expected: Vec<f32> = expected.buffer().to_vec1().unwrap();

        let gradients = Gradients::new(adapter.parameters()).unwrap();
        let witness = Witness::default();
        let names = adapter.parameters().entries();
        let id = |name: &str| names.iter().position(|entry| entry.name == name).map(ParameterId);
        let embedding = id("model.embed_tokens.weight");
        let tables =
            Tables { embedding, head: if tied { embedding } else { id("lm_head.weight") } };
        assert!(
            tables.embedding.is_some() == every_weight && tables.head.is_some() == every_weight
        );
        let mut sums = Summing::new(&gradients, Group::new(&witness), tables, passes, true);
        sums.smallest = Some(1);
        assert!(sums.is_early());
        for _ in 1..passes {
            pass(&mut sums);
        }
        assert!(witness.sums().is_empty());
        sums.last_pass(batch).unwrap();
        pass(&mut sums);
        // All layers but the first, whose own gradients come last, the head and, where its rows come by themselves and
        // it has other gradients, the embedding.
        let by_rows = batch.rows == 1;
        let tables = match (every_weight, tied) {
            (false, _) => 0,
            (true, true) => usize::from(by_rows),
            (true, false) => 1 + usize::from(by_rows && passes > 1),
        };
        assert_eq!(witness.sums().len(), 3 + tables);
        sums.passes_are_over().unwrap();
        let ranges: Vec<Range<usize>> = sums.pieces.iter().map(|it| it.range.clone()).collect();
        assert_eq!(witness.sums().len(), ranges.len());
        sums.finish().unwrap();
        let whole: Vec<f32> = gradients.buffer().to_vec1().unwrap();
        for (found, expected) in whole.iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-6 + 1e-5 * expected.abs(), "{found} {expected}");
        }
        let of_embedding = embedding.map(|id| {
            let entry = &names[id.0];
            entry.range()
        });
        let mut covered = 0;
        for (found, range) in witness.sums().iter().zip(ranges) {
            covered += range.len();
            let is_embedding = of_embedding.as_ref() == Some(&range);
            assert!((is_embedding && by_rows) || found == &whole[range.clone()], "{range:?}");
            assert!(!every_weight || found.iter().any(|number| *number != 0.0), "{range:?}");
        }
        let left_out = every_weight && !tied && by_rows && passes == 1;
        let left_out = of_embedding.filter(|_| left_out).map_or(0, |range| range.len());
        assert_eq!(covered + left_out, whole.len());
    }

    fn entry(name: &str, offset: usize, shape: &[usize]) -> Entry {
        Entry { name: name.into(), shape: shape.into(), offset }
    }

    #[test]
    fn parts_are_layers_from_the_last_and_then_the_rest() {
        let entries = [
            entry("model.embed_tokens.weight", 0, &[5, 2]),
            entry("model.layers.0.mlp.up_proj.weight", 10, &[2, 2]),
            entry("model.layers.0.mlp.down_proj.weight", 14, &[2, 2]),
            entry("model.layers.1.mlp.up_proj.weight", 18, &[2, 2]),
            entry("model.layers.2.mlp.up_proj.weight", 22, &[2, 2]),
            entry("lm_head.weight", 26, &[5, 2]),
            entry("model.layers.0.input_layernorm.weight", 36, &[2]),
            entry("model.norm.weight", 38, &[2]),
        ];
        let piece = |range, layer| Piece { range, layer };
        let pieces = |entries: &[Entry], smallest| pieces(entries, smallest, &Place::default());
        let rest = [piece(0..10, None), piece(26..40, None)];
        let [first, second] = rest;
        assert_eq!(
            pieces(&entries, 1),
            [
                piece(22..26, Some(2)),
                piece(18..22, Some(1)),
                piece(10..18, Some(0)),
                piece(0..10, None),
                piece(26..40, None)
            ]
        );
        assert_eq!(
            pieces(&entries, 5),
            [piece(18..26, Some(1)), piece(10..18, Some(0)), first, second]
        );
        assert_eq!(pieces(&entries[..0], 5), []);
        let [embedding, head] = [0, 5].map(ParameterId);
        let place = Place { above: vec![head], left_out: Some(embedding) };
        let expected = [
            piece(26..36, ABOVE),
            piece(18..26, Some(1)),
            piece(10..18, Some(0)),
            piece(36..40, None),
        ];
        assert_eq!(super::pieces(&entries, 5, &place), expected);
        // What is trained in the place of matrices comes behind all of LoRA's.
        let layers = |name: &str, offset| {
            [0usize, 1, 2].map(|layer| {
                entry(&format!("model.layers.{layer}.{name}"), offset + 4 * layer, &[2, 2])
            })
        };
        let entries = [layers("mlp.up_proj.lora_A", 0), layers("self_attn.o_proj.weight", 12)];
        let expected = [
            piece(16..24, Some(1)),
            piece(4..12, Some(1)),
            piece(12..16, Some(0)),
            piece(0..4, Some(0)),
        ];
        assert_eq!(pieces(entries.as_flattened(), 5), expected);
    }
}
