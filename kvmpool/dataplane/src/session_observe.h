/* A session that makes no context and charges nothing: it tells how the claim's card does. */
#ifndef KVMPOOL_SESSION_OBSERVE_H
#define KVMPOOL_SESSION_OBSERVE_H

#include "session.h"

/* Welcomes an observer and answers KP_OP_FIGURES until it goes; as kp_session_run. */
int kp_observe(const struct kp_session *session, int fd, const struct kp_hello *hello);

#endif
