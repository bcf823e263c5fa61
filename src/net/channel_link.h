/* SPDX-License-Identifier: MIT
 *
 * A link over several streams, its channels, so that cables add up: short messages go by channel 0
 * alone, long ones are cut over all (see wire_part).
 */
#ifndef MCCL_NET_CHANNEL_LINK_H
#define MCCL_NET_CHANNEL_LINK_H

#include "net/stream.h"

/* Takes ownership of n streams that tell without `arm`, 2 .. WIRE_CHANNELS_MAX. On error they are
 * closed. */
mccl_result link_over_channels(struct stream *const *streams, unsigned n, struct link **link);

#endif
