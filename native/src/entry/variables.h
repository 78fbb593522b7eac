/* Libraries that define variables named like the driver's functions, as function loaders without hidden visibility do. */
#ifndef GPUSLICE_VARIABLES_H
#define GPUSLICE_VARIABLES_H

/* The dynamic linker has bound references to such variables to our functions: binds them to the variables again. Objects that
 * an earlier call has handled cost nothing more. */
void gs_give_variables_back(void);

#endif
