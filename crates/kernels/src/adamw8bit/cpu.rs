//! A step of AdamW with moments of 8 bits on the CPU, a block at a time.

use super::{BLOCK, Buffers, LEVELS, Moments, TABLES};
use crate::adamw::cpu::Update;
use crate::backend::cpu::{Disjoint, change_all_in_place, change_bytes_in_place, for_each_index};
use crate::flat::cpu::Rule;
use candle_core::Result;
use std::ops::Range;

/// Blocks of one task.
const BLOCKS: usize = 32;

pub(super) fn step(
    operation: &'static str,
    buffers: &Buffers,
    grad_scale: f32,
    update: &Update,
) -> Result<()> {
    let &Buffers { params, grads, moments } = buffers;
    let Moments { m_codes, m_scales, v_codes, v_scales } = moments;
    change_all_in_place::<f32, 4>(operation, [params, grads, m_scales, v_scales], |floats| {
        change_bytes_in_place(operation, m_codes, |m_codes| {
            change_bytes_in_place(operation, v_codes, |v_codes| {
                step_blocks(floats, [m_codes, v_codes], grad_scale, update);
                Ok(())
            })
        })
    })
}

fn step_blocks(
    [params, grads, m_scales, v_scales]: [&mut [f32]; 4],
    codes: [&mut [u8]; 2],
    grad_scale: f32,
    update: &Update,
) {
    let (count, blocks) = (params.len(), m_scales.len());
    let [params, grads] = [params, grads].map(Disjoint::new);
    let scales = [m_scales, v_scales].map(Disjoint::new);
    let codes = codes.map(Disjoint::new);
    let levels = [&TABLES.signed, &TABLES.unsigned];
    for_each_index(
        blocks.div_ceil(BLOCKS),
        true,
        #[inline(always)]
        |task| {
            for block in task * BLOCKS..((task + 1) * BLOCKS).min(blocks) {
                let range = block * BLOCK..((block + 1) * BLOCK).min(count);
                // SAFETY: blocks don't overlap.
                let [params, grads] =
                    [&params, &grads].map(|all| unsafe { all.slice(range.clone()) });
                // SAFETY: as above.
                let scales = scales.each_ref().map(|all| unsafe { all.slice(block..block + 1) });
                // SAFETY: as above.
                let codes = codes.each_ref().map(|all| unsafe { all.slice(range.clone()) });
                let mut moments = [[0f32; BLOCK]; 2];
                for (index, moment) in moments.iter_mut().enumerate() {
                    let scale = scales[index][0];
                    for (moment, code) in moment.iter_mut().zip(codes[index].iter()) {
                        *moment = levels[index][usize::from(*code)] * scale;
                    }
                }
                let [m, v] = &mut moments;
                let some: Range<usize> = 0..params.len();
                update.step(params, grads, [&mut m[some.clone()], &mut v[some]], grad_scale, true);
                grads.fill(0.0);
                for (index, moment) in moments.iter().enumerate() {
                    let moment = &moment[..params.len()];
                    let most = moment.iter().fold(0f32, |most, value| most.max(value.abs()));
                    scales[index][0] = most;
                    for (code, value) in codes[index].iter_mut().zip(moment) {
                        let share = if most > 0.0 { value / most } else { 0.0 };
                        *code = nearest(share, levels[index]);
                    }
                }
            }
        },
    );
}

/// The code of the level that is nearest to `share`, the lower of two.
#[inline(always)]
fn nearest(share: f32, levels: &[f32; LEVELS]) -> u8 {
    let (mut low, mut high) = (0usize, LEVELS - 1);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if share > levels[middle] {
            low = middle;
        } else {
            high = middle;
        }
    }
    let nearer_low = (share - levels[low]).abs() <= (levels[high] - share).abs();
    (if nearer_low { low } else { high }) as u8
}
