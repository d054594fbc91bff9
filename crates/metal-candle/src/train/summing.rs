//! The sum of all ranks' gradients, whose parts are begun while the backward pass goes on.
//!
//! A backward pass goes through the layers from the last to the first. Once it gives the gradient of a layer's parameter,
//! those of all later layers are complete, and can be added up beside what is left of it. The parts are the same in every
//! run, and begun in the same order by all ranks, also by one that has no rows.

use super::gradients::Gradients;
use crate::Result;
use crate::adapter::Entry;
use crate::autograd::{GradientSink, ParameterId};
use crate::parallel::Group;
use candle_core::Tensor;
use std::ops::Range;

const WHAT: &str = "the gradients of a step";
/// Elements that are worth a sum of their own, 256 MiB: it takes some of the GPU from the work beside it, also while it
/// waits for another rank.
const SMALLEST: usize = 64 << 20;

/// A part of the gradients.
#[derive(Debug, PartialEq)]
struct Piece {
    range: Range<usize>,
    /// It is complete once the backward pass has come below this layer; `None` once it is over.
    layer: Option<usize>,
}

/// The gradients of a step while they are summed.
pub(super) struct Summing<'a> {
    gradients: &'a Gradients,
    group: Group<'a>,
    pieces: Vec<Piece>,
    begun: usize,
    /// Whether what comes now is added to what is there for the last time in this step.
    is_last_pass: bool,
    is_finished: bool,
}

impl<'a> Summing<'a> {
    /// Parts are begun early where the group can do that and `beside` is true.
    pub fn new(gradients: &'a Gradients, group: Group<'a>, beside: bool) -> Self {
        let pieces = match beside && group.sums_beside_work() {
            true => pieces(gradients.entries(), SMALLEST),
            false => vec![Piece { range: 0..gradients.buffer().elem_count(), layer: None }],
        };
        Self::of(pieces, gradients, group)
    }

    fn of(pieces: Vec<Piece>, gradients: &'a Gradients, group: Group<'a>) -> Self {
        Self { gradients, group, pieces, begun: 0, is_last_pass: false, is_finished: false }
    }

    /// That the backward pass which follows is this rank's last of the step.
    pub fn last_pass(&mut self) {
        self.is_last_pass = true;
    }

    /// Whether parts are begun before it is known what the step came to.
    pub fn is_early(&self) -> bool {
        self.pieces.iter().any(|piece| piece.layer.is_some())
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

    /// The sums, once all passes are over.
    pub fn finish(&mut self) -> Result<()> {
        while self.begun < self.pieces.len() {
            self.begin()?;
        }
        self.is_finished = true;
        self.group.end_sums(WHAT)
    }
}

impl Drop for Summing<'_> {
    /// After an error of something else, nobody else writes to the gradients: what was begun is done, or, where a rank is
    /// lost, given up. That error is told already.
    fn drop(&mut self) {
        if self.begun > 0 && !self.is_finished {
            let _ = self.group.end_sums(WHAT);
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
}

/// The layer whose matrix this is.
fn layer_of(entry: &Entry) -> Option<usize> {
    let mut path = entry.name.split('.');
    path.find(|part| *part == "layers")?;
    path.next()?.parse().ok().filter(|_| entry.shape.rank() >= 2)
}

/// All gradients in parts: neighbouring matrices of the last layers, then of those before them, then what belongs to no
/// layer, as the embedding, and vectors, which are small.
fn pieces(entries: &[Entry], smallest: usize) -> Vec<Piece> {
    let mut of_layers: Vec<Piece> = Vec::new();
    let mut rest: Vec<Piece> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.shape.elem_count() > 0) {
        let (start, layer) = (entry.offset, layer_of(entry));
        let end = start + entry.shape.elem_count();
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
    use std::cell::{Cell, RefCell};
    use std::sync::Arc;

    /// Two ranks of which the other gives nothing: sums are what they were when they were begun.
    #[derive(Debug, Default)]
    struct Witness(RefCell<Vec<Vec<f32>>>, Cell<usize>);

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
            self.0.borrow_mut().push(buffer.to_vec1()?);
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

        fn end_sums(&self, _: &'static str) -> Result<()> {
            self.1.set(self.1.get() + 1);
            Ok(())
        }
    }

    #[test]
    fn sums_that_were_begun_are_waited_for_whatever_comes_between() {
        let lora = LoraConfig { rank: 2, ..LoraConfig::default() };
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 9,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 16,
        });
        let config = Config::from_json(&config.to_string()).unwrap();
        let model = Model::random(config, DType::F32, &Device::Cpu, 5).unwrap();
        let adapter = Adapter::new(&model, &lora, 1).unwrap();
        let gradients = Gradients::new(adapter.parameters()).unwrap();
        for (begins, finishes, waits) in [(false, false, 0), (true, false, 1), (true, true, 1)] {
            let witness = Witness::default();
            let pieces = pieces(gradients.entries(), 1);
            let mut sums = Summing::of(pieces, &gradients, Group::new(&witness));
            if begins {
                sums.begin_above(0).unwrap();
                assert_eq!(witness.0.borrow().len(), 1);
            }
            if finishes {
                sums.finish().unwrap();
            }
            drop(sums);
            assert_eq!(witness.1.get(), waits);
        }
    }

    #[test]
    fn a_part_is_complete_when_its_sum_begins() {
        let batch = Batch {
            rows: 1,
            length: 6,
            input_ids: vec![3, 1, 4, 1, 5, 9],
            targets: vec![1, 4, 1, 5, 9, 2],
            positions: (0..6).collect(),
            first_key: vec![0; 6],
            tokens: 6,
            target_tokens: 6,
            ..Batch::default()
        };
        for (tied, every_weight, checkpointing) in
            [(false, true, false), (true, true, true), (true, false, false), (false, false, true)]
        {
            let config = json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
                "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20,
                "rms_norm_eps": 1e-5, "max_position_embeddings": 16, "tie_word_embeddings": tied,
            });
            let config = Config::from_json(&config.to_string()).unwrap();
            let model = Model::random(config, DType::F32, &Device::Cpu, 5).unwrap();
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
            let gradients = Gradients::new(adapter.parameters()).unwrap();
            let witness = Witness::default();
            let pieces = pieces(gradients.entries(), 1);
            let ranges: Vec<Range<usize>> = pieces.iter().map(|it| it.range.clone()).collect();
            let covered: usize = ranges.iter().map(|range| range.len()).sum();
            assert_eq!(covered, gradients.buffer().elem_count());
            let mut sums = Summing::of(pieces, &gradients, Group::new(&witness));
            assert!(sums.is_early());
            for is_last in [false, true] {
                if is_last {
                    sums.last_pass();
                }
                let tape = Tape::training().with_checkpointing(checkpointing);
                let loss = model.loss(&tape, &batch, Some(&adapter)).unwrap().sum;
                tape.backward(&loss, 1.0, &mut sums).unwrap();
                // All layers but the first, whose own gradients come last.
                assert_eq!(witness.0.borrow().len(), if is_last { 3 } else { 0 });
            }
            sums.finish().unwrap();
            let whole: Vec<f32> = gradients.buffer().to_vec1().unwrap();
            assert_eq!(witness.0.borrow().len(), ranges.len());
            for (found, range) in witness.0.borrow().iter().zip(ranges) {
                assert_eq!(found, &whole[range.clone()], "{range:?}");
                assert!(!every_weight || found.iter().any(|number| *number != 0.0));
            }
        }
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
