/* card.h: asks, in a short-lived child, whether the card opens; the asking process never loads a CUDA driver. */
#ifndef KP_CARD_H
#define KP_CARD_H

#include <stddef.h>

#include "confine.h"

#define KP_CARD_WORD_MAX 160u /* bytes of the child's one line */

/* Loads libcuda.so.1 by its soname, as a session will, and opens the one card CUDA_VISIBLE_DEVICES leaves visible; its uuid
 * must be `card` ("GPU-..."). The child is confined as a session is. 0, or -ENODEV with one line in `word`: what failed, or that no answer came in `deadline_ms`. */
int kp_card_check(const struct kp_confine *confine, const char *card, unsigned deadline_ms, char word[KP_CARD_WORD_MAX]);

#endif
